"""Routers of a transformers model whose choice of experts is read, or replaced by another's.

A router of transformers computes scores, takes the experts of a token's largest ones by torch.topk,
and makes weights of the scores at those. It is run as it is, in a mode in which that one call of
topk gives the replayed experts and the scores at them: the weights are then of the model's own
formula, and gradients flow through them into the router.
Source: rollout routing replay (R3), arXiv 2510.11370.

Which module calls topk, and at which of its calls it chooses experts, is found by running a tiny
copy of the model's layers (trial.py): no list of models has to be kept.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PreTrainedConfig

from spmdrl.config import ConfigError
from spmdrl.data.routing import Routing
from spmdrl.engines.fsdp.trial import CannotShrink, first_line, tiny_copy
from spmdrl.hub.hf_folder import config_text, meta_model
from spmdrl.hub.tiny_config import FAILURES

TOPK = (torch.topk, Tensor.topk)


class TopkCall(NamedTuple):
    """A call of topk: by which module, and of what."""

    caller: nn.Module
    shape: tuple[int, ...]  # of the scores


class RecordedCalls(TorchFunctionMode):
    """Notes calls of topk while a model runs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.calls: list[TopkCall] = []
        self.inside: list[nn.Module] = []  # modules whose forward runs, the innermost last
        for module in model.modules():
            module.register_forward_pre_hook(self.enter)
            module.register_forward_hook(self.leave, always_call=True)

    def enter(self, module: nn.Module, args: Any) -> None:
        self.inside.append(module)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.inside.pop()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in TOPK:
            self.calls.append(TopkCall(self.inside[-1], tuple(args[0].shape)))
        return func(*args, **kwargs)


class ChosenExperts(TorchFunctionMode):
    """Around one router's forward: reads which experts it chooses, or has it choose others.

    number: at which of its calls of topk it chooses experts, from 0. chosen: (num_tokens, top_k)
    int64, replayed; None: those that the router chooses.
    """

    def __init__(self, number: int, chosen: Tensor | None) -> None:
        super().__init__()
        self.number, self.chosen, self.num_experts = number, chosen, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in TOPK:
            return func(*args, **kwargs)
        self.number -= 1
        if self.number != -1:
            return func(*args, **kwargs)
        scores: Tensor = args[0]
        self.num_experts = scores.shape[-1]
        if self.chosen is None:
            found = func(*args, **kwargs)
            self.chosen = found.indices
            return found
        values = scores.gather(-1, self.chosen.view(*scores.shape[:-1], -1))
        return torch.return_types.topk((values, self.chosen.view_as(values)))


class Routers:
    """The routers of a model, in the order of its layers, each with another forward."""

    def __init__(self, hf: Any) -> None:
        """Changes the model in place. Raises ConfigError where its routing cannot be replayed."""
        numbers = router_classes(hf.config)
        self.routers = [m for m in hf.modules() if type(m).__name__ in numbers]
        self.replayed: Tensor | None = None  # (num_layers, num_tokens, top_k)
        self.recorded: list[Tensor] | None = None  # of each layer so far, (num_tokens, top_k)
        self.num_experts = 0  # known once a router has run
        for layer, router in enumerate(self.routers):
            number = numbers[type(router).__name__]
            router.forward = partial(self.route, layer, number, router.forward)

    def route(
        self, layer: int, number: int, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if self.replayed is None and self.recorded is None:
            return forward(*args, **kwargs)
        mode = ChosenExperts(number, None if self.replayed is None else self.replayed[layer].long())
        with mode:
            result = forward(*args, **kwargs)
        if self.recorded is not None:
            assert mode.chosen is not None
            self.num_experts = mode.num_experts
            self.recorded.append(mode.chosen.flatten(0, -2))
        return result

    @contextmanager
    def replaying(self, experts: Tensor) -> Iterator[None]:
        """Within, forward passes and what is computed of them again for backward passes use these
        experts. experts: (num_tokens, num_layers, top_k), of the tokens that the model is given.
        """
        assert experts.shape[1] == len(self.routers), (experts.shape, len(self.routers))
        self.replayed = experts.transpose(0, 1)
        try:
            yield
        finally:
            self.replayed = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within, one forward pass may be run, whose experts `routed` then gives."""
        self.recorded = []
        try:
            yield
        finally:
            self.recorded = None

    def routed(self) -> Tensor:
        """(num_tokens, num_layers, top_k), to be called within `recording`."""
        assert self.recorded is not None and len(self.recorded) == len(self.routers)
        found = torch.stack(self.recorded, dim=1)
        num_layers, top_k = found.shape[1:]
        return found.to(Routing(num_layers, top_k, self.num_experts).dtype)


def others_of(router: nn.Module) -> list[Tensor]:
    """Returns what a router is given beside hidden states, as numbers of any value: biases of its
    scores.
    """
    parameters = list(inspect.signature(router.forward).parameters.values())[1:]
    named = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    return [torch.empty((), device="meta") for p in named if p.default in (p.empty, None)]


# model types whose routers set the scores of other groups to 0 before they choose, and take weights
# of what is left: a replayed expert of such a group would have no weight
MASKS_GROUPS = ("deepseek_v2", "deepseek_ocr2", "axk2")
# in this process, by the whole config as text
FOUND: dict[str, dict[str, int]] = {}
ROUTINGS: dict[str, Routing] = {}


def router_classes(hf: PreTrainedConfig) -> dict[str, int]:
    """Returns the classes of a model's routers, by name, and at which of its calls of topk each of
    them chooses experts. Raises ConfigError where the model has no experts, or some of which no
    topk is made.
    """
    text = hf.get_text_config()
    key = config_text(text)
    if key not in FOUND:
        FOUND[key] = find_routers(text)
    return FOUND[key]


def find_routers(text: PreTrainedConfig) -> dict[str, int]:
    refused = f"actor.router_replay: the routing of model type {text.model_type!r}"
    groups = getattr(text, "n_group", 1) or 1
    limited = getattr(text, "topk_method", "group_limited_greedy") == "group_limited_greedy"
    if text.model_type in MASKS_GROUPS and groups > 1 and limited:
        raise ConfigError(
            f"{refused} cannot be replayed: its routers choose {groups} groups first, and an "
            "expert of another group has no weight. Leave actor.router_replay out"
        )
    try:
        tiny: Any = tiny_copy(text)
        mode = RecordedCalls(tiny)
        with torch.no_grad(), mode:
            tiny.eval()(input_ids=torch.arange(8)[None], use_cache=False)
    except (CannotShrink, *FAILURES) as error:
        raise ConfigError(
            f"{refused} is not known, since a tiny copy fails: {first_line(error)}"
        ) from error
    # an index of sparse attention takes its keys by topk too, of three-dimensional scores
    routers = list(dict.fromkeys(c.caller for c in mode.calls if len(c.shape) == 2))
    experts = [m for m in tiny.modules() if type(m).__name__.endswith("Experts")]
    if not experts and not routers:
        raise ConfigError(f"{refused} cannot be replayed: its layers have no experts")
    if len(routers) != len(experts):
        raise ConfigError(
            f"{refused} cannot be replayed: {len(experts) - len(routers)} of {len(experts)} layers "
            "of a tiny copy choose experts without torch.topk. Leave actor.router_replay out"
        )
    numbers: dict[str, int] = {}
    for router in routers:
        calls = [call for call in mode.calls if call.caller is router]
        numbers[type(router).__name__] = len(calls) - 1  # groups of experts are chosen before
    return numbers


class Found(Exception):
    """Ends a router's forward once it is known what it chooses from."""


class Asked(ChosenExperts):
    """Ends a router's forward at the call of topk by which it chooses experts."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in TOPK and self.number == 0:
            top_k = args[1] if len(args) > 1 else (kwargs or {})["k"]
            raise Found(args[0].shape[-1], top_k)
        return super().__torch_function__(func, types, args, kwargs)


def routing_of(hf: PreTrainedConfig) -> Routing:
    """Returns how a model routes its tokens, without its weights. Raises ConfigError where its
    routing cannot be replayed.
    """
    text = hf.get_text_config()
    key = config_text(text)
    if key not in ROUTINGS:
        ROUTINGS[key] = find_routing(text)
    return ROUTINGS[key]


def find_routing(text: PreTrainedConfig) -> Routing:
    numbers = router_classes(text)
    shell = meta_model(text, AutoModelForCausalLM)
    routers = [m for m in shell.modules() if type(m).__name__ in numbers]
    token = torch.empty(1, 1, text.hidden_size, device="meta", dtype=shell.dtype)
    found: set[tuple[int, int]] = set()
    for router in routers:
        number = numbers[type(router).__name__]
        try:
            with torch.no_grad(), Asked(number, None):
                router(token, *others_of(router))
        except Found as sizes:
            found.add(sizes.args)
    if len(found) != 1:
        raise ConfigError(
            f"actor.router_replay: the layers of model type {text.model_type!r} choose "
            f"{sorted((k, n) for n, k in found)} of their experts, which is to be the same in each"
        )
    ((num_experts, top_k),) = found
    return Routing(len(routers), top_k, num_experts)
