"""What grows with the number of ranks.

    python examples/bench/scale.py plan [--model llama70b] [--world 1024] [--layout fsdp]

Each measurement is a function of a module of its own and prints a JSON line for each result.
"""

from __future__ import annotations

import fire
from scale_plan import plan

MEASUREMENTS = {"plan": plan}

if __name__ == "__main__":
    fire.Fire(MEASUREMENTS)
