"""How fine-tuning deals a step's rows to ranks."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from spmdrl.data.packing import sequence_work
from spmdrl.hub.hf_folder import load_hf_config
from spmdrl.training.row_share import share_of
from spmdrl.training.supervised import export, stored_mtp


def test_ranks_are_given_equal_work():
    draw = np.random.default_rng(0)
    num_tokens = draw.lognormal(5, 1, 500).astype(np.int64) + 2
    rows = SimpleNamespace(measured=SimpleNamespace(num_tokens=num_tokens))
    step = draw.permutation(500)[:64].tolist()
    for num_ranks in (1, 2, 3, 8):
        data_ranks = tuple(range(0, 2 * num_ranks, 2))  # each has one beside it that helps

        def share(rank, data_ranks=data_ranks):
            return share_of(rows, step, SimpleNamespace(
                topology=SimpleNamespace(rank=rank), ranks=data_ranks))  # fmt: skip

        shares = [share(rank) for rank in data_ranks]
        assert sorted(i for part in shares for i in part) == sorted(step)
        assert share(1) == []
        assert imbalance(rows, shares) < 1.03
    dealt_in_turn = [step[rank::8] for rank in range(8)]
    assert imbalance(rows, dealt_in_turn) > 1.5


def imbalance(rows, shares) -> float:
    lens = torch.from_numpy(rows.measured.num_tokens)
    loads = [float(sequence_work(lens[share]).sum()) for share in shares]
    return max(loads) * len(loads) / sum(loads)


def test_a_full_disk_is_named_where_the_model_is_written(qwen3, tmp_path):
    config, tokenizer = load_hf_config(str(qwen3)), AutoTokenizer.from_pretrained(qwen3)
    run = SimpleNamespace(
        runtime=SimpleNamespace(is_main=True), tokenizer=tokenizer,
        actor=SimpleNamespace(model=SimpleNamespace(pretrained=(config,))),
        task=SimpleNamespace(kind="policy"), config=SimpleNamespace(out_dtype=None),
    )  # fmt: skip
    (tmp_path / "model.safetensors.unfinished").symlink_to("/dev/full")
    weight = torch.zeros(1 << 20)
    with pytest.raises(OSError, match=f"cannot write {tmp_path}.* MiB are free: No space left"):
        export(iter([("w", weight)]), {"w": (1 << 20,)}, run, tmp_path)


def test_a_run_ends_with_its_model_where_the_files_of_untrained_layers_are_gone(capsys):
    """Those for multi-token prediction."""
    run = SimpleNamespace(config=SimpleNamespace(model="/no/such/model"))
    assert stored_mtp(run) is None
    said = capsys.readouterr()
    assert "without its multi-token prediction layers, which stand in /no/such/model: " in (
        said.out + said.err
    )
