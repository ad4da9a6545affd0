"""Finds where an engine keeps which part of which weight, by the engine's own loader.

The loader is run once with tensors that have a shape and no data. What it would copy is written
down and not copied: the source is a view of a known tensor, whose offset, sizes and strides say
which part of it is meant; the destination is a view of a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from spmdrl.distributed.torch_compat import TorchDispatchMode, storage_id
from spmdrl.weights.boxes import Box, box_of, sizes, whole
from spmdrl.weights.buffers import persistent_buffers

if TYPE_CHECKING:
    from spmdrl.weights.checkpoint_names import SubTensor

Loader = Callable[[Iterable[tuple[str, Tensor]]], Any]


class ParamView(NamedTuple):
    """A part of an engine's parameter.

    Looked up anew at every use: engines move their parameters, and some replace them.
    """

    module: nn.Module
    name: str  # of the parameter or buffer in the module
    offset: int  # in elements, from the parameter's first
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def tensor(self) -> Tensor:
        data = getattr(self.module, self.name).detach()
        return data.as_strided(self.size, self.stride, data.storage_offset() + self.offset)


@dataclass
class Layout:
    """The part `regions[i]`, a (name, Box) of a full Hugging Face tensor, belongs at `places[i]`.

    The weights in `opaque` are handed to the engine's loader as full tensors. Those in `float32`
    are kept in float32, whatever the others are kept in (decays of a state, biases of a router).
    Those in `quantized` are kept in FP8 (spmdrl_kernels.fp8); `scales` says which of their blocks'
    scales belong where: its names are the weights', its boxes are of their grids of blocks.
    """

    regions: list[tuple[str, Box]] = field(default_factory=list)
    places: list[ParamView] = field(default_factory=list)
    opaque: list[str] = field(default_factory=list)
    float32: list[str] = field(default_factory=list)
    quantized: list[str] = field(default_factory=list)
    scales: list[tuple[str, Box]] = field(default_factory=list)
    scale_places: list[ParamView] = field(default_factory=list)


class ByName:
    """An engine's model of full tensors, found by the names of a checkpoint or by their own.

    `elsewhere` has the checkpoint's names that are no parameter's: whose part they are, and which.
    """

    def __init__(self, model: nn.Module, elsewhere: Mapping[str, tuple[str, SubTensor]]) -> None:
        self.elsewhere = elsewhere
        self.parameters: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        self.parameters |= persistent_buffers(model)
        self.missing = {p.data_ptr(): (name, p.numel()) for name, p in self.parameters.items()}
        self.found: set[str] = set()

    def find(self, name: str) -> tuple[str, Tensor]:
        """The parameter's name, and the view of it. Raises ValueError where there is none."""
        owner, part = self.elsewhere.get(name, (name, None))
        parameter = self.parameters.get(owner)
        if parameter is None:
            raise ValueError(f"the engine's model has no parameter {name}")
        held = parameter.detach() if part is None else part.of(parameter.detach())
        pointer = parameter.data_ptr()
        if name not in self.found and pointer in self.missing:
            left = self.missing[pointer][1] - held.numel()
            self.missing[pointer] = (owner, left)
            if left <= 0:  # a tied one may be given twice
                del self.missing[pointer]
        self.found.add(name)
        return owner, held

    def require_all(self) -> None:
        if self.missing:
            names = sorted(name for name, _ in self.missing.values())
            raise ValueError(f"weights were not given: {names}")


def layout_by_name(
    model: nn.Module,
    shapes: Mapping[str, Any],
    elsewhere: Mapping[str, tuple[str, SubTensor]] | None = None,
) -> Layout:
    """Returns the layout of an engine that keeps full tensors; elsewhere: as ByName takes it.

    Raises ValueError naming a weight that it lacks, or one that is not given.
    """
    layout, by_name = Layout(), ByName(model, elsewhere or {})
    for name, shape in shapes.items():
        owner, held = by_name.find(name)
        layout.regions.append((name, whole(shape)))
        path, _, leaf = owner.rpartition(".")
        offset = int(held.storage_offset() - by_name.parameters[owner].storage_offset())
        place = ParamView(model.get_submodule(path), leaf, offset, tuple(held.shape), held.stride())
        layout.places.append(place)
        if held.dtype == torch.float32:
            layout.float32.append(name)
    by_name.require_all()
    return layout


def record_layout(
    model: nn.Module, load: Loader, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> Layout:
    """Runs `load` on tensors without data and writes down what it copies where.

    A weight is opaque where the loader computes with it, wants to look into it, or copies it into
    something else than a parameter. Elements that nothing is copied to, like the padding of a
    vocabulary, are as the loader leaves them.
    """
    recorder = _Recorder(model)
    names = iter(shapes)

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name in names:
            tensor = torch.empty(shapes[name], dtype=dtype, device="meta")
            recorder.give(name, tensor)
            yield name, tensor

    while len(recorder.given) < len(shapes):
        try:
            with torch.no_grad(), recorder:
                load(weights())
        except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
            # it asked for a value, which a tensor without data refuses; go on with the next
            if not recorder.current or recorder.current in recorder.opaque:
                raise ValueError(
                    f"the engine's loader failed at {recorder.current}: {error}"
                ) from error
            recorder.opaque.add(recorder.current)
    return recorder.layout(shapes)


class _Recorder(TorchDispatchMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.parameters = {  # by storage
            tensor.untyped_storage().data_ptr(): (module, name, tensor)
            for module in model.modules()
            for name, tensor in (
                *module.named_buffers(recurse=False),
                *module.named_parameters(recurse=False),
            )
            if tensor.numel()
        }
        # by storage; the tensors are kept, so that no storage's number is used twice
        self.given: dict[int, tuple[str, Tensor]] = {}
        self.current = ""
        self.opaque: set[str] = set()
        self.copies: list[tuple[str, Box, ParamView]] = []
        self.float32: set[str] = set()  # those of the given that a float32 parameter takes

    def give(self, name: str, tensor: Tensor) -> None:
        self.current = name
        self.given[storage_id(tensor)] = (name, tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        without_data = [a for a in args if isinstance(a, Tensor) and a.is_meta]
        if func is torch.ops.aten.copy_.default and args[1].is_meta and not args[0].is_meta:
            self.note(args[0], args[1])
            return args[0]
        if func is torch.ops.aten.copy_.default and self.is_parameter(args[0]):
            self.opaque.add(self.current)  # a parameter is computed from what was copied to it
        if is_changed(func, args):  # a rank may have zeros of what another keeps
            self.opaque.add(self.given.get(storage_id(args[0]), (self.current,))[0])
        result = func(*args, **(kwargs or {}))
        for tensor in without_data:
            outputs = result if isinstance(result, (tuple, list)) else [result]
            if any(_is_new(output, tensor) for output in outputs):
                self.opaque.add(self.given.get(storage_id(tensor), (self.current,))[0])
        return result

    def is_parameter(self, tensor: Tensor) -> bool:
        return not tensor.is_meta and tensor.untyped_storage().data_ptr() in self.parameters

    def note(self, target: Tensor, source: Tensor) -> None:
        name, full = self.given.get(storage_id(source), (self.current, None))
        owner = self.parameters.get(target.untyped_storage().data_ptr())
        box = None if full is None else box_of(source, full)
        if box is None or owner is None or target.shape != source.shape:
            self.opaque.add(name)
            return
        module, leaf, parameter = owner
        if parameter.dtype == torch.float32:
            self.float32.add(name)
        offset = int(target.storage_offset() - parameter.storage_offset())
        target = target.view(sizes(box))
        place = ParamView(module, leaf, offset, tuple(target.shape), target.stride())
        self.copies.append((name, box, place))

    def layout(self, shapes: Mapping[str, Any]) -> Layout:
        layout = Layout(
            opaque=[name for name in shapes if name in self.opaque],
            float32=[name for name in shapes if name in self.float32],
        )
        for name, box, place in self.copies:
            if name not in self.opaque:
                layout.regions.append((name, box))
                layout.places.append(place)
        return layout


def is_changed(func: Any, args: tuple[Any, ...]) -> bool:
    """Says whether an operation changes a tensor without data in place."""
    changes = func.__name__.partition(".")[0].endswith("_")
    return changes and isinstance(args[0], Tensor) and bool(args[0].is_meta)


def _is_new(output: Any, tensor: Tensor) -> bool:
    """Returns True if the output is no view of the tensor, so that later copies of it would not be
    understood.
    """
    return (
        isinstance(output, Tensor) and output.is_meta and storage_id(output) != storage_id(tensor)
    )
