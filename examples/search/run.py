"""The search example from nothing to a policy that searches, on two CPU cores. docs/search.md

    python examples/search/run.py

Makes the assets, fine-tunes the model on them, starts the retriever, and trains with GRPO.
Arguments go to the last: --steps 10.
"""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

HERE = Path(__file__).parent
CONFIGS = HERE.parents[1] / "configs"
PORT = 8817
STARTS_WITHIN_S = 60


def main() -> None:
    run(HERE / "make_assets.py")
    program("spmdrl.sft", "qwen3_tiny_search_sft_cpu.py")
    command = [sys.executable, str(HERE / "retriever.py"), "--port", str(PORT)]
    with subprocess.Popen(command) as retriever:
        try:
            wait_for(retriever)
            program("spmdrl.ppo", "qwen3_tiny_search_grpo_cpu.py", *sys.argv[1:])
        finally:
            retriever.terminate()


def run(*command: str | Path) -> None:
    subprocess.run([sys.executable, *map(str, command)], check=True)


def program(name: str, config: str, *args: str) -> None:
    launch = ("-m", "spmdrl.launch", "--nproc-per-node", "2", "-m", name)
    run(*launch, "--config", str(CONFIGS / config), *args)


def wait_for(retriever: subprocess.Popen[bytes]) -> None:
    """Returns once the retriever answers. Raises RuntimeError where it ends, or does not."""
    end = time.monotonic() + STARTS_WITHIN_S
    while retriever.poll() is None and time.monotonic() < end:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{PORT}/retrieve")
        except urllib.error.HTTPError:  # it is there, and wants a POST
            return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError("the retriever did not start; its own message stands above")


if __name__ == "__main__":
    main()
