"""Attention over packed sequences, as an attention function for Hugging Face models.

Sequences lie end to end in one row of tokens. On GPUs in half precision the flash-attention varlen
kernel runs on that row as it is. Elsewhere sequences of like length are laid out as right-padded
rows of a batch: a causal query never sees what stands right of it, so the padding needs no mask,
and no block-diagonal (tokens x tokens) mask is ever built.

Where sequences share a prefix (data/shared_prefix.py) the row has it once, as a run of its own. The
queries of a run behind it see copies of its keys and values, then those of their own run; in the
backward pass the copies' gradients are summed, always in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from spmdrl.data.images import LooksAhead
from spmdrl.data.shared_prefix import spans
from spmdrl.distributed.torch_compat import varlen_backward, varlen_forward
from spmdrl.engines.fsdp.prefix_sharing import CopyRows, PrefixCopies
from spmdrl.engines.fsdp.ulysses import SequenceParallelGroup, to_heads, to_tokens
from spmdrl.types import to_device

NAME = "spmdrl_packed"
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


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packing: Packing | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    flash: Callable[..., Tensor] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query: (1, heads, tokens, head_dim), key, value: (1, kv_heads, ...) -> (1, tokens, heads, d).

    packing: None: it is `module.packed_by.packing` (per_sequence_layers.py).
    s_aux: (heads,) sinks: what each head has in its softmax beside the scores, and gives nothing.
    flash: what computes it on GPUs in half precision instead of torch's own varlen attention.

    Raises ValueError for what a model asks and this does not do: dropout, attention that is not
    causal, and soft-capped scores in torch's varlen attention.
    """
    if dropout or not getattr(module, "is_causal", True):
        raise ValueError(f"packed attention lacks dropout={dropout} or non-causal use")
    packing = packing or getattr(getattr(module, "packed_by", None), "packing", None)
    if packing is None:
        raise ValueError("its layers do not hand on where the sequences of a packed row begin")
    if packing.ahead is not None and packing.ahead.windows_alone and sliding_window is None:
        packing = packing.looking_back
    chunk = chunk_of(module)
    if chunk is not None:
        packing = packing.chunked(chunk)
    team = packing.team
    if team is not None:
        query, key, value = to_heads(query, key, value, team)
        if s_aux is not None:
            s_aux = s_aux.chunk(team.size)[team.rank]
    half = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    half = half and packing.ahead is None  # the kernels have no mask
    size, width = query.shape[-1], value.shape[-1]
    compute = (flash or _flash) if half and has_flash(size) else _padded
    if compute is not _padded and width < size:  # the kernels have one width for all three
        value = pad(value, (0, size - width))
    out = compute(query, key, value, packing, scaling, sliding_window, softcap, s_aux)
    out = out[..., :width]
    return out if team is None else to_tokens(out, team), None


def has_flash(head_size: int) -> bool:
    """Says whether the flash kernels have heads of this width: Gemma 4's wide ones have not."""
    return head_size <= 256 and head_size % 8 == 0


def chunk_of(module: Any) -> int | None:
    """Returns how many tokens a chunk of this attention has; None where it is not in chunks."""
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None) or ()
    number = getattr(module, "layer_idx", None)
    if config is None or number is None or number >= len(kinds):
        return None
    return config.attention_chunk_size if kinds[number] == "chunked_attention" else None


def _flash(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None,
    sliding_window: int | None, softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    from torch.nn.attention.varlen import varlen_attn

    if softcap is not None:
        raise ValueError(f"torch's varlen attention lacks softcap={softcap}; flash-attn has it")
    q, k, v, row = varlen_inputs(query, key, value, packing)
    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    if sinks is not None:
        return SinkAttention.apply(q, k, v, sinks, row, scaling, window)[None]
    out: Any = varlen_attn(
        q, k, v, row.cu_queries, row.cu_keys, row.max_queries, row.max_keys,
        scale=scaling, window_size=window, enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    return out[None]


class SinkAttention(torch.autograd.Function):
    """Flash attention with sinks: softmax([scores, sink]) without the sink's column.

    The kernel's forward pass gives the output o and log-sum-exp l of the scores alone. With the
    sink s in the sum, l' = log(e^l + e^s) and o' = o e^(l - l'). The kernel's backward pass makes
    its probabilities from l' and its correction from o', so given these it returns the gradients of
    o'; what is left is the sink's own, -e^(s - l') (do' . o') summed over the queries.
    Source of sinks: gpt-oss, arXiv 2508.10925, section 2.2.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, row: VarlenRow,
        scale: float | None, window: tuple[int, int],
    ) -> Tensor:  # fmt: skip
        """q: (queries, heads, d), k, v: (keys, kv_heads, d), sinks: (heads,) -> like q."""
        out, lse, rng = varlen_forward(q, k, v, row, scale, window)  # lse: (heads, queries) float32
        total = torch.logaddexp(lse, sinks.float()[:, None])
        out = (out * (lse - total).exp().T[..., None]).to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, total, rng)
        ctx.row, ctx.scale, ctx.window = row, scale, window
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (grad,) = grads
        q, k, v, sinks, out, total, rng = ctx.saved_tensors
        grad = grad.contiguous()
        saved = (q, k, v, out, total, rng)
        dq, dk, dv = varlen_backward(grad, *saved, ctx.row, ctx.scale, ctx.window)
        shares = (sinks.float()[:, None] - total).exp()  # (heads, queries)
        products = (grad.float() * out.float()).sum(-1).T
        return dq, dk, dv, -(shares * products).sum(1).to(sinks.dtype), None, None, None


def varlen_inputs(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing
) -> tuple[Tensor, Tensor, Tensor, VarlenRow]:
    """(1, heads, tokens, d) each -> (tokens, heads, d) of the queries, (keys, kv_heads, d) of the
    others, as varlen kernels take them. These align a sequence's last query with its last key.
    """
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    row = packing.varlen
    if row.copies is not None:
        k, v = (CopyRows.apply(t, row.copies) for t in (k, v))
    return q.contiguous(), k.contiguous(), v.contiguous(), row


def _padded(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None,
    sliding_window: int | None, softcap: float | None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))  # (tokens, heads, head_dim)
    outs = []
    for group in packing.groups:
        rows = group if group.keys is None else group.keys.rows
        mask: Tensor | None
        if group.keys is not None and group.keys.masked:
            asked, mask = group, group.keys.mask(group.length, sliding_window)
        else:
            asked, mask = rows, group.mask(sliding_window)
        # (num_seqs, length, heads, head_dim) -> (num_seqs, heads, length, head_dim)
        gq, gk, gv = (
            Pad.apply(t, of).transpose(1, 2) for t, of in ((q, asked), (k, rows), (v, rows))
        )
        if softcap is None and sinks is None:
            out = scaled_dot_product_attention(
                gq, gk, gv, attn_mask=mask, is_causal=mask is None, scale=scaling,
                enable_gqa=gq.shape[1] != gk.shape[1],
            )  # fmt: skip
        else:
            out = plain_attention(gq, gk, gv, mask, scaling, softcap, sinks)
        outs.append(Unpad.apply(out.transpose(1, 2), group, len(q)))
    return sum(outs[1:], start=outs[0])[None]


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float | None,
    softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attention with scores cap * tanh(scores / cap), with sinks, or with both, in plain form.
    (n, heads, length, d) each; sinks: (heads,).

    Source of the cap: Gemma 2, arXiv 2408.00118, section 2.
    """
    if mask is None:
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf).float()
    if sinks is not None:
        column = sinks.float()[:, None, None].expand(len(scores), -1, scores.shape[2], 1)
        scores = torch.cat([scores, column], dim=-1)
    return scores.softmax(-1)[..., : k.shape[2]].to(q.dtype) @ v


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


AttentionInterface.register(NAME, packed_attention)
