"""megatron-core's process-wide state, one per role.

megatron-core keeps its process groups in globals of one module and takes torch.distributed's
default group for all ranks there are. Roles may lie on different ranks and have different layouts:
each has its own set of globals, which stand only while the role is at work, and its ranks are then
all that torch.distributed knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from spmdrl.distributed.collectives import world_of
from spmdrl.distributed.topology import Topology
from spmdrl.distributed.torch_compat import timeout_of
from spmdrl.engines.megatron import compat
from spmdrl.engines.megatron import cpu_shim as mcore_cpu
from spmdrl.engines.megatron import patches as mcore_fixes


@dataclass
class RoleState:
    """The values that megatron.core.parallel_state holds for one role; None: the host's, as it
    stands.
    """

    group: dist.ProcessGroup | None
    values: dict[str, Any] | None

    @classmethod
    def build(cls, topology: Topology, **sizes: Any) -> RoleState:
        """Makes the role's groups. sizes: of initialize_model_parallel. Collective over the role.

        Another set that is initialised, a host's or another role's, is left as it is.
        """
        mcore_cpu.install()
        from megatron.core import parallel_state

        mcore_fixes.install(adam=not parallel_state.model_parallel_is_initialized())
        state = cls(topology.group, compat.blank_parallel_globals())
        with state.active():
            parallel_state.initialize_model_parallel(
                distributed_timeout_minutes=timeout_of(topology.group) // timedelta(minutes=1),
                **sizes,
            )
            state.values = compat.parallel_globals()
        return state

    @classmethod
    def of_host(cls) -> RoleState:
        """Returns the state of a program which has initialised megatron-core itself, and made it
        run here.
        """
        return cls(None, None)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Around every call of megatron-core."""
        if self.values is None or self.group is None:
            yield
            return
        before = compat.parallel_globals()
        compat.set_parallel_globals(self.values)
        try:
            with world_of(self.group), mcore_cpu.scope():
                yield
        finally:
            compat.set_parallel_globals(before)
