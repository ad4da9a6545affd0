"""The internals of SGLang that spmdrl uses, each behind one function. Written for sglang 0.5.23.

SGLang's Engine starts its scheduler in processes of their own and talks to them over ZeroMQ. In a
rank that torchrun started, this is what verl and slime have servers, Ray actors and CUDA IPC for.
We build the Scheduler itself in the rank instead, as the process that Engine starts would
(sglang.srt.managers.scheduler.run_scheduler_process), and drive it as its event_loop_normal does.
It takes torch.distributed as it finds it: init_distributed_environment makes its groups among the
ranks of the default group, which spmdrl.distributed.collectives.world_of replaces meanwhile.

tests/rollout/test_sglang_signatures.py checks every call below with the signatures of the published
package; tests/rollout/test_sglang_compat.py calls these functions where sglang is installed.
docs/sglang.md says what was run on which machine.
"""

from __future__ import annotations

import importlib
import sys
from array import array
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from spmdrl.rollout.base import WAKE_TAGS

VERSION = "0.5.23"
INSTALL = "launch/setup.sh --engine sglang makes an environment of its own for it"
NO_WATCHDOG_S = 1e8  # SGLang's watchdog would kill a program that trains between two bursts


# ---- building an engine


def import_engine() -> None:
    """Imports what `build_scheduler` needs: sglang.srt.managers.scheduler and the rest by it."""
    importlib.import_module("sglang.srt.managers.scheduler")


def use_memory_saver_in_process() -> None:
    """Has torch_memory_saver take memory by an allocator of torch's. Its other way is LD_PRELOAD,
    which a process would have to be started with. Sets hook_mode, before its first use.
    """
    import torch_memory_saver

    saver: Any = torch_memory_saver.torch_memory_saver
    saver.hook_mode = "torch"


def server_args(**options: Any) -> Any:
    """Returns SGLang's options, resolved and checked: sglang.srt.server_args.ServerArgs. Raises
    ValueError for what SGLang refuses.
    """
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(**options)
    args.resolve_once()
    args.check_server_args()
    return args


def build_scheduler(args: Any, rank: int, gpu: int) -> Any:
    """Builds scheduler, KV cache and model runner in this process: a Scheduler without sockets.

    Collective over the default group of torch.distributed, whose ranks are the tensor-parallel
    ones. gpu: index of this rank's device. Overrides init_ipc_channels, which would open sockets
    to a tokenizer's process on rank 0; other ranks have none in SGLang too.
    """
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.ipc_channels import SchedulerIpcChannels
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import PortArgs

    class RankScheduler(Scheduler):
        def init_ipc_channels(self, port_args: Any) -> None:
            self.ipc_channels = SchedulerIpcChannels.create(
                port_args=port_args, is_rank_zero=False, skip_tokenizer_init=True,
                metrics_enabled=False, enable_scripted_runtime=False,
            )  # fmt: skip
            self.load_snapshot_writer = None
            self.recv_from_tokenizer = None

    no_ports = PortArgs(
        tokenizer_ipc_name="", scheduler_input_ipc_name="", detokenizer_ipc_name="", nccl_port=0,
        rpc_ipc_name="", metrics_ipc_name="", tokenizer_worker_ipc_name=None,
        decoupled_spec_ipc_config=None,
    )  # fmt: skip
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=rank, dp_rank=None, gpu_id=gpu))
    return RankScheduler(args, no_ports)


def shutdown(scheduler: Any) -> None:
    """Frees what the scheduler holds. Its watchdog's thread keeps the object itself, so that it is
    emptied; a scheduler has no method for it that leaves the caller's process groups alone. Calls
    sglang.srt.runtime_context.reset_context, since what is published is the process's.
    """
    from sglang.srt.runtime_context import reset_context

    scheduler.release_host_resources()
    vars(scheduler).clear()
    reset_context()


def destroy_groups() -> None:
    """Destroys SGLang's own process groups, made beside the caller's. Imports nothing: where SGLang
    could not be imported, that is what the user is to read. Reads and clears _WORLD and _SELF_PP in
    sglang.srt.distributed.parallel_state: destroy_model_parallel leaves the latter, and
    destroy_distributed_environment would destroy the caller's default group too.
    """
    parallel_state: Any = sys.modules.get("sglang.srt.distributed.parallel_state")
    if parallel_state is None:
        return
    parallel_state.destroy_model_parallel()
    for name in ("_SELF_PP", "_WORLD"):
        group = getattr(parallel_state, name)
        if group is not None:
            group.destroy()
            setattr(parallel_state, name, None)


def model_of(scheduler: Any) -> Any:
    """Returns the nn.Module with this rank's weights. Reads tp_worker.model_runner.model."""
    return scheduler.tp_worker.model_runner.model


def most_tokens(scheduler: Any) -> int:
    """Returns how many tokens the KV cache holds. Reads max_total_num_tokens."""
    return int(scheduler.max_total_num_tokens)


def kv_caches(scheduler: Any) -> list[Tensor]:
    """Returns the tensors of the KV cache, two for each layer. Reads k_buffer and v_buffer of
    tp_worker.model_runner.token_to_kv_pool.
    """
    pool = scheduler.tp_worker.model_runner.token_to_kv_pool
    return [*pool.k_buffer, *pool.v_buffer]


def replace_draws(scheduler: Any, draw: Any) -> None:
    """Has `draw` choose tokens: (num_rows, vocab) logits -> (num_rows,) token ids. Row i belongs to
    the i-th request of the batch that `forward` was given. Replaces the forward of
    tp_worker.model_runner.sampler, of which only logits_output.next_token_logits is used.
    """

    def forward(logits_output: Any, *_: Any, **__: Any) -> Tensor:
        tokens: Tensor = draw(logits_output.next_token_logits)
        return tokens

    scheduler.tp_worker.model_runner.sampler.forward = forward


# ---- requests


def add_request(scheduler: Any, rid: str, token_ids: Sequence[int], max_tokens: int) -> Any:
    """Queues a sequence to be continued by at most max_tokens; returns SGLang's object for it.

    SGLang looks for no stop in it: the caller does. Calls Scheduler.handle_generate_request, and
    reads waiting_queue. Raises ValueError where SGLang would abort it or cut it short.
    """
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(max_new_tokens=max_tokens, ignore_eos=True)
    params.normalize(None)
    request = TokenizedGenerateReqInput(
        rid=rid, input_text=None, input_ids=array("q", token_ids), input_embeds=None,
        mm_inputs=None, token_type_ids=None, sampling_params=params, return_logprob=False,
        logprob_start_len=-1, top_logprobs_num=0, token_ids_logprob=None, stream=False,
    )  # fmt: skip
    scheduler.handle_generate_request(request)
    queued = scheduler.waiting_queue[-1]
    kept = queued.sampling_params.max_new_tokens
    if queued.to_finish is not None or kept != max_tokens:
        raise ValueError(
            f"SGLang refuses {len(token_ids)} tokens to be continued by {max_tokens}: "
            f"{queued.to_finish or f'it would end them after {kept}'}"
        )
    return queued


def abort_request(scheduler: Any, rid: str) -> None:
    """Takes a request out of the queue, or ends it with its next pass. SGLang takes `rid` for the
    beginning of names. Calls Scheduler.abort_request.
    """
    from sglang.srt.managers.io_struct import AbortReq

    scheduler.abort_request(AbortReq(rid=rid))


def end_request(queued: Any) -> None:
    """Has a request end with the token that its batch was just given. Writes Req.to_finish."""
    from sglang.srt.managers.schedule_batch import FINISH_LENGTH

    queued.to_finish = FINISH_LENGTH(length=len(queued.output_ids) + 1)


def num_waiting(scheduler: Any) -> int:
    """Returns how many requests have no place in a batch. Reads waiting_queue."""
    return len(scheduler.waiting_queue)


def is_idle(scheduler: Any) -> bool:
    """Returns whether no request is left, nor a batch to be ended. Calls is_fully_idle."""
    return bool(scheduler.is_fully_idle())


# ---- steps: the parts of Scheduler.event_loop_normal


def next_batch(scheduler: Any) -> Any:
    """Returns the ScheduleBatch to be computed next, if any. Calls get_next_batch_to_run."""
    plan = scheduler.get_next_batch_to_run(
        running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
    )
    scheduler.running_batch = plan.running_batch
    return plan.batch_to_run


def forward(scheduler: Any, batch: Any) -> Any:
    """Computes a batch on the current stream and draws its tokens. Calls run_batch."""
    return scheduler.run_batch(batch)


def finish_batch(scheduler: Any, batch: Any, result: Any) -> None:
    """Gives requests their tokens, and frees what ended ones held. Calls process_batch_result.
    batch, result: None where there was none.
    """
    if batch is not None:
        scheduler.process_batch_result(batch, result)
    scheduler.last_batch = batch


def row_names(batch: Any) -> list[str]:
    """Returns the names of a batch's requests, in the order of its rows. Reads reqs and rid."""
    return [queued.rid for queued in batch.reqs]


def takes_token(queued: Any) -> bool:
    """Returns whether the token just drawn belongs to the request's answer: not where a prompt is
    prefilled in chunks and this was not the last. Reads inflight_middle_chunks.
    """
    return bool(queued.inflight_middle_chunks <= 0)


# ---- caches and memory


def forget_prefixes(scheduler: Any) -> bool:
    """Empties the cache of prefixes; requests that run are queued again with their tokens so far.
    Returns whether it is empty. Calls pause_generation, flush_cache and continue_generation.
    """
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

    scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
    flushed = scheduler.flush_cache(empty_cache=False)
    scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))
    return bool(flushed)


def release_memory(scheduler: Any) -> None:
    """Drops weights and KV cache; buffers are kept. Calls release_memory_occupation of the
    scheduler's weight_updater. Collective over the ranks.
    """
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

    request = ReleaseMemoryOccupationReqInput(tags=list(WAKE_TAGS))
    scheduler.weight_updater.release_memory_occupation(request)


def resume_memory(scheduler: Any, tags: list[str]) -> None:
    """Takes the memory of these of WAKE_TAGS again, whose contents are not what they were. Calls
    resume_memory_occupation.
    """
    from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

    request = ResumeMemoryOccupationReqInput(tags=tags)
    scheduler.weight_updater.resume_memory_occupation(request)
