"""Says which of several adapters a row belongs to, by its data source (LoraConfig.by_source)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache

import torch
from torch import Tensor

from spmdrl.config import ConfigError, LoraConfig

OTHERS = "*"  # stands for all sources that are not named


def adapter_of(lora: LoraConfig | None, data_source: str) -> int:
    """Returns the place in LoraConfig.names of a data source's adapter; 0 where there is one
    adapter or none. Raises ConfigError where the source has none of several.
    """
    if lora is None or not lora.by_source:
        return 0
    name = lora.by_source.get(data_source, lora.by_source.get(OTHERS))
    if name is None:
        raise ConfigError(
            f"actor.lora.by_source has {[*lora.by_source]}, and no adapter for data_source "
            f"{data_source!r}: name its adapter, or one for all other sources under {OTHERS!r}"
        )
    return lora.names.index(name)


def check_adapter_sources(
    lora: LoraConfig | None, data_sources: Iterable[str], trained: bool = False
) -> None:
    """Raises ConfigError where a data source has no adapter. trained: the rows are those that are
    learnt from, so that each entry of by_source must have some.
    """
    if lora is None or not lora.by_source:
        return
    sources = list(data_sources)
    for source in sources:
        adapter_of(lora, source)
    named = [source for source in lora.by_source if source != OTHERS]
    unused = [source for source in named if source not in sources]
    if trained and unused:
        raise ConfigError(
            f"actor.lora.by_source[{unused[0]!r}]: no row has this data_source; the data has "
            f"{', '.join(map(repr, sources))}"
        )
    if trained and OTHERS in lora.by_source and set(sources) <= set(named):
        raise ConfigError(
            f"actor.lora.by_source[{OTHERS!r}] has no effect: every data_source is named. Leave it "
            "out"
        )


class AdapterRoutes:
    """Says which adapter a sequence belongs to, by the id of its prompt."""

    def __init__(self, lora: LoraConfig, data_source: Callable[[int], str]) -> None:
        """data_source: returns that of the prompt with an id."""

        def number(prompt: int) -> int:
            return adapter_of(lora, data_source(prompt))

        self.number = lru_cache(maxsize=65536)(number)

    def of(self, prompts: Tensor) -> Tensor:
        """prompts: (num_seqs,) int64, as Batch.prompts -> (num_seqs,) int64, as Batch.adapters."""
        return torch.tensor([self.number(i) for i in prompts.tolist()], dtype=torch.int64)


def adapter_routes_of(
    lora: LoraConfig | None, data_source: Callable[[int], str]
) -> AdapterRoutes | None:
    """None where there are not several adapters. data_source: as of AdapterRoutes."""
    return AdapterRoutes(lora, data_source) if lora is not None and lora.by_source else None
