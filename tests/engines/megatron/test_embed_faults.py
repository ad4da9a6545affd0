"""A rank that fails or dies inside an embedded step: the cause is said at once, the others end."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import start_ranks, wait_all

pytestmark = [pytest.mark.ranks, pytest.mark.megatron]

LIMIT_S = 30  # from the failure until all have ended; torch's own limit is 30 minutes


def failing_on(topology, folder, model, how):
    """Rank 1 fails in its second update, within a forward pass, or ("outside") between steps."""
    from spmdrl.engines.megatron import cpu_shim as mcore_cpu

    mcore_cpu.install()
    from embedded_models import TP2, host_model, rl_config

    from spmdrl.embed import attach

    with mcore_cpu.scope():
        chunks, optimizer = host_model(model, False, **TP2)
        rl = attach(chunks, optimizer, rl_config(model, folder))
        rl.step(1)
        if how == "outside":
            try:
                if topology.rank == 1:
                    Path(folder, "failed").write_text(str(time.time()))
                    raise RuntimeError("no space left for the host's checkpoint")
                dist.barrier()  # as a host's save_checkpoint has
            finally:
                rl.close()
        if topology.rank == 1:
            layer = chunks[0].module.decoder.layers[1]

            def fail(*args):
                if torch.is_grad_enabled():
                    Path(folder, "failed").write_text(str(time.time()))
                    if how == "dies":
                        os.kill(os.getpid(), signal.SIGKILL)
                    raise RuntimeError("the lights went out")

            layer.register_forward_pre_hook(fail)
        rl.step(2)


@pytest.mark.parametrize("how", ["raises", "dies"])
def test_a_failure_inside_the_update_is_said_at_once_and_ends_all(qwen3, tmp_path, how):
    from programs import write_task

    write_task(tmp_path)
    calls = [(failing_on, (str(tmp_path), str(qwen3), how))]
    procs = start_ranks(2, calls, str(tmp_path))
    assert wait_all(procs, 120, kill_after_s=LIMIT_S)
    ended = time.time() - float(Path(tmp_path, "failed").read_text())
    logs = [Path(tmp_path, f"log_{rank}").read_text() for rank in (0, 1)]
    assert ended < LIMIT_S, logs
    codes = [process.exitcode for process in procs]
    assert codes == ([1, 1] if how == "raises" else [1, -signal.SIGKILL]), logs
    said = re.findall(r"spmdrl: rank 1 on .* failed in phase '([^']+)': (.*);", "".join(logs))
    assert len(said) == 1, "\n".join(logs)
    phase, cause = said[0]
    if how == "raises":
        assert "spmdrl: rank 1" in logs[1]  # who failed says it
        assert (phase, cause) == ("update_actor", "RuntimeError: the lights went out")
        failure = json.loads(Path(tmp_path, "run", "errors", "rank_1.json").read_text())
        assert "in fail" in failure["details"]
    else:
        assert "ended without a word" in cause


def test_close_in_a_finally_does_not_wait_for_ranks_that_wait_elsewhere(qwen3, tmp_path):
    from programs import write_task

    write_task(tmp_path)
    calls = [(failing_on, (str(tmp_path), str(qwen3), "outside"))]
    procs = start_ranks(2, calls, str(tmp_path))
    assert wait_all(procs, 120, kill_after_s=LIMIT_S)
    ended = time.time() - float(Path(tmp_path, "failed").read_text())
    assert ended < LIMIT_S and procs[1].exitcode == 1
    assert "no space left for the host's checkpoint" in Path(tmp_path, "log_1").read_text()
