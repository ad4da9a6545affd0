"""Writes the rows of examples/verifiers/multiply_env.py, which a Python with verifiers tells.

python -m venv runs/verifiers && runs/verifiers/bin/pip install verifiers==0.3.1
python examples/verifiers/make_rows.py
"""

from pathlib import Path

from spmdrl.environments.episodes import write_rows
from spmdrl.environments.verifiers import verifiers_rows

PYTHON = "runs/verifiers/bin/python"
HERE = str(Path(__file__).parent.resolve())

if __name__ == "__main__":
    for split in ("train", "eval"):
        rows = verifiers_rows(PYTHON, "multiply-env", env={"PYTHONPATH": HERE}, split=split)
        count = write_rows(f"runs/multiply/verifiers_{split}.jsonl", rows)
        print(f"{count} rows in runs/multiply/verifiers_{split}.jsonl")
