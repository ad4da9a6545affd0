"""Rows of packed sequences: where each sequence begins, and how they are laid out for attention.

Flash attention's varlen kernels take the row as it is. Elsewhere sequences of like length are
padded into groups.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from spmdrl.data.images import LooksAhead
from spmdrl.data.shared_prefix import spans
from spmdrl.engines.fsdp.prefix_sharing import PrefixCopies
from spmdrl.engines.fsdp.ulysses import SequenceParallelGroup
from spmdrl.segments import to_device

MAX_PADDING = 1.25  # padded length / own length inside one group of sequences
MAX_MASK = 1 << 22  # elements: of a mask for the queries behind a prefix; each layer keeps one


@dataclass(frozen=True)
class Packing:
    """The places of the sequences in one micro-batch, or of the runs that share prefixes."""

    seq_lens: Tensor  # (num_seqs,) int64 on the CPU
    device: torch.device
    team: SequenceParallelGroup | None = (
        None  # ranks that hold equal runs of the tokens; None: they are all here
    )
    # (num_seqs,) int64 on the CPU: which sequence's tokens stand before its own; -1: none do
    prefixes: Tensor | None = None
    ahead: LooksAhead | None = None  # tokens that see each other, also those behind them

    @classmethod
    def build(
        cls, seq_lens: Tensor, device: torch.device, team: SequenceParallelGroup | None = None,
        prefixes: Tensor | None = None,
    ) -> Packing:  # fmt: skip
        """seq_lens: (num_seqs,) int64 on the CPU. prefixes: the same; None: nothing is shared."""
        if prefixes is not None and not bool((prefixes >= 0).any()):
            prefixes = None
        return cls(seq_lens, device, team, prefixes)

    @cached_property
    def starts(self) -> Tensor:
        """(num_seqs,) int64 on the CPU: where in the row each sequence begins."""
        return self.seq_lens.cumsum(0) - self.seq_lens

    @cached_property
    def in_chunks(self) -> dict[int, Packing]:
        """Keeps `chunked` by length of a chunk, made once for all layers."""
        return {}

    def chunked(self, size: int) -> Packing:
        """Returns the row for attention within chunks: a token sees those of its own `size` tokens
        of the sequence, counted from the sequence's begin. Shared prefixes cannot be chunked.
        """
        if int(self.seq_lens.max()) <= size:
            return self
        assert self.prefixes is None
        if size not in self.in_chunks:
            counts = (self.seq_lens + size - 1) // size
            lens = torch.full((int(counts.sum()),), size)
            lens[counts.cumsum(0) - 1] = self.seq_lens - (counts - 1) * size
            self.in_chunks[size] = Packing(lens, self.device, self.team)
        return self.in_chunks[size]

    @cached_property
    def looking_back(self) -> Packing:
        """Returns the row where every token sees those before it alone."""
        return Packing(self.seq_lens, self.device, self.team, self.prefixes)

    @cached_property
    def varlen(self) -> VarlenRow:
        """Says what the varlen kernels are told."""
        longest = int(self.seq_lens.max())
        if self.prefixes is None:
            (cu_queries,) = to_device([cumulated(self.seq_lens)], self.device)
            return VarlenRow(cu_queries, longest, cu_queries, longest, None)
        tokens, key_lens = self.seen_tokens(torch.arange(len(self.seq_lens)))
        copies = PrefixCopies.of(tokens, torch.arange(len(tokens)), self.device)
        cu_queries, cu_keys = to_device(
            [cumulated(self.seq_lens), cumulated(key_lens)], self.device
        )
        return VarlenRow(cu_queries, longest, cu_keys, int(key_lens.max()), copies)

    @cached_property
    def groups(self) -> tuple[PaddedGroup, ...]:
        """Says what is computed together where there is no varlen kernel."""
        everything = torch.arange(len(self.seq_lens))
        if self.ahead is not None:
            assert self.prefixes is None
            of = torch.repeat_interleave(everything, self.seq_lens)[: len(self.ahead.blocks)]
            shown = torch.isin(everything, of[self.ahead.blocks >= 0])
            return (
                *padded_groups(self, everything[~shown]),
                *padded_groups(self, everything[shown], self.ahead.blocks),
            )
        if self.prefixes is None:
            return padded_groups(self, everything)
        behind = self.prefixes >= 0
        return (
            *padded_groups(self, everything[~behind]), *prefixed_groups(self, everything[behind]),
        )  # fmt: skip

    def seen_tokens(self, seqs: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens whose keys these sequences' last queries see, one sequence after the other.

        Returns (n,) places in the row and (num_seqs,) numbers of tokens, int64 on the CPU.
        """
        prefixes = torch.full_like(seqs, -1) if self.prefixes is None else self.prefixes[seqs]
        shared = torch.where(prefixes >= 0, self.seq_lens[prefixes], 0)
        pieces = torch.stack([self.starts[prefixes], self.starts[seqs]], dim=1).flatten()
        sizes = torch.stack([shared, self.seq_lens[seqs]], dim=1)
        return spans(pieces, sizes.flatten()), sizes.sum(1)


def cumulated(lens: Tensor) -> Tensor:
    """(n,) -> (n + 1,) int32: where each of so many runs begins, and the end."""
    return pad(lens.cumsum(0), (1, 0)).to(torch.int32)


class VarlenRow(NamedTuple):
    """Says where queries and keys of each sequence are, for flash attention's varlen kernels."""

    cu_queries: Tensor  # (num_seqs + 1,) int32, on the device
    max_queries: int
    cu_keys: Tensor  # (num_seqs + 1,) int32, on the device
    max_keys: int
    copies: PrefixCopies | None  # make the keys of the row's tokens; None: they are the same


@dataclass(frozen=True)
class PaddedGroup:
    """Sequences that are computed together, right-padded to `length`.

    The num_seqs * length padded places are tokens and holes. Holes are zeroed: a query never gives
    one any weight, but no weight times what is not a number is not a number.
    """

    tokens: Tensor | None  # (n,) int64: positions in the packed row; None: all of them, in order
    slots: Tensor  # (n,) int64: the padded places that hold them
    holes: Tensor  # (num_seqs * length - n,) int64: the others
    num_seqs: int
    length: int
    copies: PrefixCopies | None = None  # where tokens stand several times: sum their gradients
    keys: PrefixedKeys | None = None  # what the queries see; None: the keys of the same tokens
    images: Tensor | None = None  # (num_seqs, length) int64: blocks, where tokens look ahead
    masks: dict[int | None, Tensor] = field(default_factory=dict)  # of these, by sliding window

    def mask(self, window: int | None) -> Tensor | None:
        """Says which keys a query sees: (num_seqs, 1, length, length) bool, or (length, length);
        None where it sees all before it.
        """
        device = self.slots.device
        if self.images is None:
            return _window_mask(self.length, window, device)
        if window not in self.masks:
            ones = torch.ones(self.length, self.length, dtype=torch.bool, device=device)
            same = (self.images[:, None] == self.images[..., None]) & (self.images >= 0)[:, None]
            seen = ones.tril() | same
            if window is not None:
                seen &= ~ones.tril(-window)
            self.masks[window] = seen[:, None]
        return self.masks[window]


@dataclass(frozen=True)
class PrefixedKeys:
    """The keys of a group of sequences behind shared prefixes.

    Few queries behind a long prefix are computed by themselves, with a mask. For others the
    prefix's queries are computed with them, causally and without a mask, and thrown away: a mask
    would grow with the square of the length.
    """

    rows: PaddedGroup  # of each sequence its prefix, then its own tokens
    before: Tensor  # (num_seqs,) int64, on the device: tokens of the prefix
    masked: bool
    masks: dict[int | None, Tensor] = field(default_factory=dict)  # by sliding window

    def mask(self, num_queries: int, window: int | None) -> Tensor:
        """(num_seqs, 1, num_queries, keys) bool: which keys a query sees."""
        if window not in self.masks:
            device, num_keys = self.before.device, self.rows.length
            queries = self.before[:, None] + torch.arange(num_queries, device=device)
            # a hole's query sees some key too: a softmax over none is not a number
            queries = queries.clamp(max=num_keys - 1)[..., None]
            keys = torch.arange(num_keys, device=device)
            seen = keys <= queries
            if window is not None:
                seen &= keys > queries - window
            self.masks[window] = seen[:, None]
        return self.masks[window]


def padded_groups(
    packing: Packing, seqs: Tensor, blocks: Tensor | None = None
) -> tuple[PaddedGroup, ...]:
    """Groups these sequences by length. seqs: (n,) int64, ascending; blocks: LooksAhead's."""
    lens = packing.seq_lens
    cut = by_length(seqs, lens, slack=8)
    alone = len(cut) == 1 and len(seqs) == len(lens)
    return tuple(
        padded(
            spans(packing.starts[members], lens[members]),
            lens[members],
            packing.device,
            alone=alone,
            blocks=blocks,
        )
        for members in cut
    )


def prefixed_groups(packing: Packing, seqs: Tensor) -> tuple[PaddedGroup, ...]:
    """Groups these sequences, each of which has a prefix, by their own and by the whole length."""
    lens, groups = packing.seq_lens, []
    before = torch.zeros_like(lens)
    assert packing.prefixes is not None
    before[seqs] = lens[packing.prefixes[seqs]]
    for like in by_length(seqs, lens, slack=8):
        for members in by_length(like, before + lens, slack=64):
            tokens, key_lens = packing.seen_tokens(members)
            rows = padded(tokens, key_lens, packing.device, several=True)
            (shared,) = to_device([before[members]], packing.device)
            queries = int(lens[members].max())
            small = len(members) * queries * rows.length <= MAX_MASK
            keys = PrefixedKeys(rows, shared, masked=small and 2 * queries <= rows.length)
            own = spans(packing.starts[members], lens[members])
            first = torch.zeros_like(members) if keys.masked else before[members]
            groups.append(padded(own, lens[members], packing.device, keys=keys, first=first))
    return tuple(groups)


def by_length(seqs: Tensor, lens: Tensor, slack: int) -> list[Tensor]:
    """Cuts the sequences, longest first, where one is shorter than the first by MAX_PADDING and
    `slack` tokens. Returns ascending numbers of sequences. lens: of all sequences.
    """
    cut: list[list[int]] = []
    of = lens.tolist()
    for seq in seqs[torch.argsort(lens[seqs], descending=True, stable=True)].tolist():
        if cut and of[cut[-1][0]] <= MAX_PADDING * of[seq] + slack:
            cut[-1].append(seq)
        else:
            cut.append([seq])
    return [torch.tensor(sorted(members)) for members in cut]


def padded(
    tokens: Tensor, lens: Tensor, device: torch.device, *, alone: bool = False,
    several: bool = False, keys: PrefixedKeys | None = None, first: Tensor | None = None,
    blocks: Tensor | None = None,
) -> PaddedGroup:  # fmt: skip
    """tokens: (sum of lens,) int64 places in the row of the sequences with these lengths.

    alone: they are the whole row, in order. several: one may be there more than once. first: (n,)
    the place of each sequence's first token in its padded row; None: 0.
    """
    first = torch.zeros_like(lens) if first is None else first
    length = int((first + lens).max())
    places = torch.arange(length)[None, :] - first[:, None]
    inside = ((places >= 0) & (places < lens[:, None])).flatten()  # (n * length,)
    slots = inside.nonzero().flatten()
    placed = to_device([tokens, slots, (~inside).nonzero().flatten()], device)
    images: Tensor | None = None
    if blocks is not None:
        images = torch.full((len(lens) * length,), -1)
        images[slots] = blocks[tokens]
        (images,) = to_device([images.view(len(lens), length)], device)
    return PaddedGroup(
        tokens=None if alone else placed[0],
        slots=placed[1],
        holes=placed[2],
        num_seqs=len(lens),
        length=length,
        copies=PrefixCopies.of(tokens, slots, device) if several else None,
        keys=keys,
        images=images,
    )


def _window_mask(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """(length, length) bool, causal and at most `window` back; None where that is no limit."""
    if window is None or window >= length:
        return None
    ones = torch.ones(length, length, dtype=torch.bool, device=device)
    return ones.tril() & ~ones.tril(-window)


class Pad(torch.autograd.Function):
    """(num_tokens, heads, d) -> (num_seqs, length, heads, d); `Unpad` is its transpose.

    Copies by index in both directions, where autograd's own backward would be a slow index_add.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: PaddedGroup) -> Tensor:
        ctx.group, ctx.num_tokens = group, len(rows)
        return to_padded(rows, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return from_padded(grads[0], ctx.group, ctx.num_tokens), None


class Unpad(torch.autograd.Function):
    """(num_seqs, length, heads, d) -> (num_tokens, heads, d), zero on tokens of other groups."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, group: PaddedGroup, num_tokens: int) -> Tensor:
        ctx.group = group
        return from_padded(padded, group, num_tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return to_padded(grads[0], ctx.group), None, None


def to_padded(rows: Tensor, group: PaddedGroup) -> Tensor:
    picked = rows if group.tokens is None else rows.index_select(0, group.tokens)
    shape = (group.num_seqs, group.length, *rows.shape[1:])
    if len(group.holes) == 0:
        return picked.reshape(shape)
    out = rows.new_empty(group.num_seqs * group.length, *rows.shape[1:])
    out.index_copy_(0, group.slots, picked)
    out.index_fill_(0, group.holes, 0.0)
    return out.view(shape)


def from_padded(padded: Tensor, group: PaddedGroup, num_tokens: int) -> Tensor:
    picked = padded.reshape(-1, *padded.shape[2:])
    if group.copies is not None:
        return group.copies.summed(picked, num_tokens)
    if len(group.holes):
        picked = picked.index_select(0, group.slots)
    if group.tokens is None:
        return picked
    return picked.new_zeros(num_tokens, *picked.shape[1:]).index_copy_(0, group.tokens, picked)
