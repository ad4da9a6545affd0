import os
from pathlib import Path

import pytest
from ranks import ENGINE_ENV
from tiny import save_qwen3

for name, value in ENGINE_ENV.items():
    os.environ.setdefault(name, value)


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny Qwen3 with its tokenizer."""
    return save_qwen3(tmp_path_factory.mktemp("qwen3"))
