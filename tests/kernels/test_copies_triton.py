"""Copies of many tensors in one launch, and FP8 in blocks, against plain PyTorch."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from spmdrl_kernels import copies, fp8
from torch import Tensor
from triton_tests import DEVICE, READY, run_interpreted

pytestmark = pytest.mark.compiles

if READY:
    from spmdrl_kernels import copies_triton

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
SPECIAL = [0.0, -0.0, 1.0, float("inf"), -float("inf"), float("nan"), 3.5e38, 65519.9, 65520.0,
           1e-40, 6e-8, 3e-8, 2.0**-25, 1.00390625, 1.01171875, -1.00390625, 3.396e38]  # fmt: skip


@pytest.fixture
def forced(monkeypatch):
    """Tensors of this machine go to the kernels, whatever it is."""
    monkeypatch.setattr(copies, "on_triton", lambda *t: True)
    monkeypatch.setattr(fp8, "on_triton", lambda *t: True)


def bits(t: Tensor) -> Tensor:
    """NaN are one number: CPUs and GPUs differ in their bits."""
    if t.is_floating_point() and t.dtype != fp8.DTYPE:
        t = t.masked_fill(t.isnan(), torch.nan)
    return t.contiguous().view(-1).view(torch.uint8)


def numbers(g: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Of all exponents that float32 has, any bits, and special ones."""
    ints = torch.randint(-(2**31), 2**31, shape, generator=g, dtype=torch.int64).int()
    x = ints.view(torch.float32)
    flat = x.view(-1)
    count = min(len(SPECIAL), flat.numel())
    flat[torch.randperm(flat.numel(), generator=g)[:count]] = torch.tensor(SPECIAL[:count])
    return x.to(dtype)


def odd_boxes(g: torch.Generator, dtype: torch.dtype) -> list[Tensor]:
    """Slices of shards, transposed, expanded, empty, without and with many dimensions."""
    base = numbers(g, 97 * 131, dtype=dtype)
    wide = base[: 64 * 192].view(64, 192)
    cube = base[3 : 3 + 7 * 9 * 11].view(7, 9, 11)
    return [
        base[1:5000], base[:4096], base[:12000], base[5:5], base[7], wide[3:60, 5:100],
        wide[:, :1], wide[:, 16:96], wide.T[2:9], wide[::3], wide[:, ::7], cube,
        cube[1:, 2:, 3:8], cube.permute(2, 0, 1)[:3], cube[0].expand(3, 9, 11), wide[:0],
        wide[:, 16:96],
    ]  # fmt: skip


def destinations(like: list[Tensor], dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Views within poisoned memory, one in two strided; and the memory of each."""
    views, memories = [], []
    for number, t in enumerate(like):
        if number % 2 and t.dim() == 2:
            left, right = (16, 32) if t.shape[1] % 16 == 0 else (2, 3)
            shape = (t.shape[0] + 2, t.shape[1] + left + right)
            memory = torch.full(shape, 77, device=DEVICE).to(dtype)
            views.append(memory[1:-1, left:-right])
        else:
            first = (16, 3)[number % 3 == 0]
            memory = torch.full((t.numel() + 40,), 77, device=DEVICE).to(dtype)
            views.append(memory[first : first + t.numel()].view(t.shape))
        memories.append(memory)
    return views, memories


def check_copies(source: list[Tensor], dtype: torch.dtype, via: torch.dtype | None = None) -> None:
    """Bit for bit, and not a byte beside the destinations."""
    source = [on_device(s) for s in source]
    to, memories = destinations(source, dtype)
    wanted, expected = destinations(source, dtype)
    for t, s in zip(wanted, source, strict=True):
        t.copy_(s if via is None else s.to(via))
    copies.Copies(via).run(to, source)
    for found, want in zip(memories, expected, strict=True):
        assert torch.equal(bits(found), bits(want))


def on_device(t: Tensor) -> Tensor:
    """With the strides that it has."""
    if t.device.type == DEVICE:
        return t
    whole = t.untyped_storage()
    memory = torch.empty(0, dtype=t.dtype).set_(whole).to(DEVICE)
    return memory.as_strided(t.shape, t.stride(), t.storage_offset())


# weights of a trainer and an engine: those of two dimensions and even rows travel in FP8
SHAPES = [(7,), (9, 33), (256, 160), (5, 64), (130, 256), (1,)]
Ranks = list[int]


class Trainer:
    """Row shards in float32, which `move` puts elsewhere."""

    def __init__(self, topology: Any) -> None:
        from transformers import Qwen3Config

        g = torch.Generator().manual_seed(12)
        self.pretrained = [Qwen3Config()]
        self.mesh = topology.mesh["fsdp"]
        self.full: dict[str, Tensor] = {}
        self.weights: dict[str, Any] = {}
        for number, shape in enumerate(SHAPES):
            self.full[f"w{number}"] = torch.randn(shape, generator=g)
        self.move()

    def move(self) -> None:
        from torch.distributed.tensor import Shard, distribute_tensor

        for name, full in self.full.items():
            full.mul_(-1.7)
            sharded = distribute_tensor(full, self.mesh, [Shard(0)], src_data_rank=None)
            self.weights.setdefault(name, sharded)._local_tensor = sharded.to_local()

    def named_shards(self) -> dict[str, Any]:
        from spmdrl.weights.shards import shards_of

        return {name: shards_of(weight) for name, weight in self.weights.items()}


class Engine:
    """Bfloat16, and some in FP8; matrices are cut by columns over tensor-parallel ranks."""

    has_weights = True

    def __init__(self, topology: Any) -> None:
        from spmdrl.weights.engine_layout import Layout, ParamView

        tp, rank = topology.axis_size("tp"), topology.axis_rank("tp")
        self.model, self.found = torch.nn.Module(), Layout()

        def add(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, ParamView]:
            size = list(shape)
            box = [(0, n) for n in shape]
            if len(size) == 2 and size[1] % tp == 0:
                size[1] //= tp
                box[1] = (rank * size[1], (rank + 1) * size[1])
            memory = torch.zeros([size[0], *[n + 3 for n in size[1:]]]).to(dtype)
            self.model.register_buffer(name, memory)
            return tuple(box), ParamView(self.model, name, 0, tuple(size), memory.stride())

        for number, shape in enumerate(SHAPES):
            name, quantized = f"w{number}", len(shape) == 2 and shape[0] % 2 == 0
            box, place = add(name, shape, fp8.DTYPE if quantized else torch.bfloat16)
            self.found.regions.append((name, box))
            self.found.places.append(place)
            if quantized:
                self.found.quantized.append(name)
                box, place = add(name + "_scale", fp8.num_blocks(shape), torch.float32)
                self.found.scales.append((name, box))
                self.found.scale_places.append(place)

    def poison(self) -> None:
        for memory in self.model.buffers():
            memory.fill_(77)

    def held(self) -> list[bytes]:
        return [t.view(torch.uint8).numpy().tobytes() for t in self.model.buffers()]

    def layout(self, shapes: Any) -> Any:
        return self.found

    def finish_load(self, running: bool = False) -> None:
        pass


def push_both_ways(topology: Any, cases: list[tuple[Ranks, Ranks, int, int]]) -> list[int]:
    """Pushes as on a CPU and as on a GPU, twice; returns how many launches the latter had."""
    from spmdrl.config import WeightsConfig
    from spmdrl.distributed.topology import Topology
    from spmdrl.training import weight_sync as sync

    launches: list[int] = []
    for name in ("copy_kernel", "block_kernel"):
        setattr(copies_triton, name, Counted(getattr(copies_triton, name), launches))
    counts = []
    for trainers, engines, tp, slot in cases:
        cpu = torch.device("cpu")
        actor_ranks = Topology.build(cpu, trainers, dp=1, fsdp=-1)
        rollout_ranks = Topology.build(cpu, engines, dp=-1, tp=tp)
        actor: Any = Trainer(actor_ranks) if actor_ranks.here else None
        rollout: Any = Engine(rollout_ranks) if rollout_ranks.here else None
        sync.slot_bytes = lambda bucket, device, slot=slot: slot

        def make(actor=actor, rollout=rollout, ranks=(actor_ranks, rollout_ranks)) -> Any:
            return sync.WeightSync(actor, ranks[0], rollout, ranks[1], "bfloat16", WeightsConfig())

        plain, fast = make(), make()
        fast.build_block_groups()
        pushed = []
        for _ in range(2):
            held = []
            for way in (plain, fast):
                kernels = way is fast
                copies.on_triton = fp8.on_triton = lambda *t, kernels=kernels: kernels
                if rollout is not None:
                    rollout.poison()
                stats = way.push()
                assert stats.planned_bytes == stats.moved_bytes
                held.append(rollout.held() if rollout is not None else [])
            assert held[0] == held[1], (trainers, engines, tp)
            pushed.append(held[0])
            if actor is not None:
                actor.move()
        assert rollout is None or pushed[0] != pushed[1]
        counts.append(len(launches))
        launches.clear()
    return counts


class Counted:
    """A kernel whose launches are noted, with their number of programs."""

    def __init__(self, kernel: Any, launches: list[int]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.launches.append(grid[0])
        return self.kernel[grid]


if not READY:

    def test_interpreted():
        run_interpreted(__file__)

else:

    @pytest.mark.parametrize("to", FLOATS)
    @pytest.mark.parametrize("source", FLOATS)
    def test_casts_have_the_bits_of_torch(forced, source, to):
        g = torch.Generator().manual_seed(3 * FLOATS.index(source) + FLOATS.index(to))
        check_copies(odd_boxes(g, source), to)

    def test_every_bfloat16_tie(forced):
        """All upper halves of float32 with lower halves at, below and above the tie."""
        upper = np.arange(1 << 16, dtype=np.uint32)[::5] << 16
        values = [torch.from_numpy(upper + np.uint32(low)) for low in (0, 0x7FFF, 0x8000, 0x8001)]
        check_copies([v.view(torch.float32) for v in values], torch.bfloat16)

    @pytest.mark.parametrize(
        "dtype", [torch.float64, torch.int64, torch.uint8, torch.bool, fp8.DTYPE, torch.complex128]
    )
    def test_what_is_not_cast_is_moved_as_it_is(forced, dtype):
        g = torch.Generator().manual_seed(3)
        raw = torch.randint(0, 2, (97 * 131,), generator=g)
        raw = raw.to(torch.float32).to(dtype) if dtype == fp8.DTYPE else raw.to(dtype)
        source = [raw[1:4100], raw[: 64 * 80].view(64, 80)[3:, 16:64], raw[:0]]
        check_copies(source, dtype)

    @pytest.mark.parametrize("via", [torch.bfloat16, torch.float16])
    def test_by_way_of_the_dtype_of_the_wire(forced, via):
        g = torch.Generator().manual_seed(4)
        source = odd_boxes(g, torch.float32)[:7]
        check_copies(source, torch.float32, via)
        check_copies(source, torch.float16 if via == torch.bfloat16 else torch.bfloat16, via)

    def test_small_tensors_and_a_large_one_in_one_launch(forced, monkeypatch):
        g, count = torch.Generator().manual_seed(5), 5000 if DEVICE == "cuda" else 500
        sizes = torch.randint(0, 40, (count,), generator=g).tolist() + [50_000]
        memory = torch.randn(sum(sizes) + 1, generator=g).to(DEVICE)
        source = list(memory[1:].split(sizes))
        buffer = torch.full((sum(sizes) + 8,), 7.0, dtype=torch.bfloat16, device=DEVICE)
        launches: list[int] = []
        kernel = Counted(copies_triton.copy_kernel, launches)
        monkeypatch.setattr(copies_triton, "copy_kernel", kernel)
        copies.Copies().run(list(buffer[3:-5].split(sizes)), source)
        assert launches == [count - sizes.count(0) + 13]
        assert torch.equal(buffer[3:-5], memory[1:].bfloat16())
        assert (buffer[:3] == 7).all() and (buffer[-5:] == 7).all()

    def test_tensors_that_move_or_change_shape_are_looked_at_anew(forced, monkeypatch):
        uploads = []
        upload = copies_triton._upload
        monkeypatch.setattr(
            copies_triton, "_upload", lambda *a: uploads.append(a[0].shape) or upload(*a)
        )
        job = copies.Copies()
        to, source = ([torch.randn(n, 6, device=DEVICE) for n in (3, 50)] for _ in range(2))
        for moved in (False, False, True, True):
            if moved:
                source = [s.clone().mul_(2) for s in source]
            job.run(to, source)
            assert all(torch.equal(t, s) for t, s in zip(to, source, strict=True))
        assert len(uploads) == 3 * 3
        source = [s.view(-1).as_strided(s.shape, (1, len(s))) for s in source]  # where they lay
        job.run(to, source)
        assert all(torch.equal(t, s) for t, s in zip(to, source, strict=True))
        job.run([], [])
        with pytest.raises(ValueError, match=r"\(3, 6\) does not fit \(50, 6\)"):
            job.run(to[::-1], source)
        with pytest.raises(ValueError, match="1 tensors are to be copied into 2"):
            job.run(to, source[:1])

    def test_boxes_of_more_columns_than_32_bits_count():
        most = copies_triton.NO_END

        def cut(*args):
            return [(b.source_offset, b.to_offset, b.total) for b in copies_triton.boxes(*args)]

        assert cut((most + 5,), (1,), (1,)) == [(0, 0, most), (most, most, 5)]
        assert cut((2, most), (most + 1, 1), (most, 1)) == [
            (0, 0, most), (most + 1, most, most),
        ]  # fmt: skip
        assert cut((2, most + 1), (most + 9, 1), (most + 1, 1)) == [
            (0, 0, most), (most, most, 1), (most + 9, most + 1, most),
            (2 * most + 9, 2 * most + 1, 1),
        ]  # fmt: skip
        assert copies_triton.boxes((50, 60, 2, 2), (5000, 50, 7, 3), (240, 4, 2, 1)) is None

    def test_boxes_hold_every_element_once(monkeypatch):
        """Of random slices and permutations: each is where the tensors have it."""
        monkeypatch.setattr(copies_triton, "NO_END", 50)
        g = torch.Generator().manual_seed(13)

        def strided(shape: list[int]) -> Tensor:
            order = torch.randperm(len(shape), generator=g).tolist()
            steps, extra = torch.randint(1, 3, (2, len(shape)), generator=g).tolist()
            wide = [shape[i] * steps[i] + (extra[i] - 1) * 3 for i in order]
            memory = torch.arange(int(np.prod(wide))).view(wide)
            x = memory.permute([order.index(i) for i in range(len(shape))])
            cut = tuple(slice(0, n * step, step) for n, step in zip(shape, steps, strict=True))
            return x[cut]

        for _ in range(200):
            dims = int(torch.randint(0, 5, (), generator=g))
            shape = torch.randint(1, 8, (dims,), generator=g).tolist()
            source, to = strided(shape), strided(shape)
            found = []
            copies_triton.boxes.cache_clear()
            for box in copies_triton.boxes(tuple(shape), source.stride(), to.stride()):
                i = np.arange(box.total)
                row, column = i // box.columns, i % box.columns
                found += zip(box.source_offset + row * box.source_stride + column,
                             box.to_offset + row * box.to_stride + column, strict=True)  # fmt: skip
            wanted = zip(source.flatten().tolist(), to.flatten().tolist(), strict=True)
            assert sorted(found) == sorted(wanted), (shape, source.stride(), to.stride())
        copies_triton.boxes.cache_clear()

    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("shape", [(1, 1), (128, 256), (130, 300), (257, 40), (0, 5)])
    def test_fp8_from_one_read(forced, monkeypatch, shape, dtype):
        g = torch.Generator().manual_seed(shape[0])
        w = torch.randn(shape, generator=g)
        w *= torch.logspace(-38, 1, max(1, w.numel())).view(-1)[: w.numel()].view(shape)
        if len(w) > 128:
            w[:128, :128] = 0
            w[128:, 128:] = 448.9 * 2.0**-149
        w = w.to(dtype).to(DEVICE)
        for given in (w, w.T.contiguous().T):
            q, scale_inv = fp8.quantize_blocks(given)
            with monkeypatch.context() as plain:
                plain.setattr(fp8, "on_triton", lambda *t: False)
                want, scales = fp8.quantize_blocks(w)
            assert torch.equal(scale_inv, scales)
            assert torch.equal(q.view(torch.uint8), want.view(torch.uint8))

    @pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
    def test_fp8_of_what_is_not_finite_is_refused(forced, value):
        w = torch.ones(200, 200, device=DEVICE)
        w[150, 7] = value
        with pytest.raises(ValueError, match=r"\(200, 200\) is not finite"):
            fp8.quantize_blocks(w)
        largest = torch.zeros(2, 2, device=DEVICE)
        fp8.block_maxima(w, (0, 0), largest)
        assert largest.tolist() == [[1, 1], [torch.inf, 1]]

    def test_every_number_to_e4m3(forced, monkeypatch):
        """Any bits, by scales that do not fit them: some are too large, some not numbers."""
        g = torch.Generator().manual_seed(8)
        w = numbers(g, 200, 140).to(DEVICE)
        w[0] = torch.tensor([448.0, 464, 464.1, 479.9, 480, -464.1, 500] * 20)
        w[1] = torch.arange(140) * 2.0**-11
        w[130:] = torch.randn(70, 140, generator=g).to(DEVICE) * 100
        scale_inv = torch.tensor([[1.0, 0.37], [1e-3, 0.3]], device=DEVICE)
        found = torch.zeros(204, 150, dtype=fp8.DTYPE, device=DEVICE)
        want = found.clone()
        fp8.quantize_part(w, (0, 0), scale_inv, found[2:-2, 3:143])
        monkeypatch.setattr(fp8, "on_triton", lambda *t: False)
        fp8.quantize_part(w, (0, 0), scale_inv, want[2:-2, 3:143])
        assert torch.equal(found.view(torch.uint8), want.view(torch.uint8))
        assert {0x7E, 0x7F, 0xFE} <= set(want.view(torch.uint8).view(-1).tolist())

    def test_fp8_parts_in_one_launch_have_the_bits_of_the_whole(forced, monkeypatch):
        g = torch.Generator().manual_seed(9)
        w = torch.randn(389, 300, generator=g).to(DEVICE)
        rows, columns = [0, 5, 130, 131, 256, 384, 384, 389], [0, 127, 128, 300]
        cut = [(slice(a, b), slice(c, d)) for a, b in pairwise(rows) for c, d in pairwise(columns)]
        largest = torch.zeros(fp8.num_blocks(tuple(w.shape)), device=DEVICE)
        for box in cut:
            fp8.block_maxima(w[box], (box[0].start, box[1].start), largest)
        with monkeypatch.context() as plain:
            plain.setattr(fp8, "on_triton", lambda *t: False)
            want, scale_inv = fp8.quantize_blocks(w)
        assert torch.equal(fp8.scales_of(largest), scale_inv)
        q = torch.zeros_like(want)
        firsts = [(box[0].start, box[1].start) for box in cut]
        parts = [copies.Part(w[box], at, scale_inv) for box, at in zip(cut, firsts, strict=True)]
        job = copies.Quantized()
        job.run([q[box] for box in cut], parts)
        job.run([], [])
        assert torch.equal(q.view(torch.uint8), want.view(torch.uint8))
        assert list(job.tables) == [torch.float32]

    @pytest.mark.ranks
    @pytest.mark.skipif(DEVICE == "cuda", reason="gloo carries what a CPU has")
    def test_weights_on_their_way_through_the_kernels():
        """Handed over, gathered and kept, cast and in FP8: the engine's bytes, and those beside."""
        both = [0, 1]
        cases = [(both, both, 1, 1 << 20), (both, both, 2, 9000), ([0], [1], 1, 60_000)]
        for rank, counts in enumerate(run_ranks(2, push_both_ways, cases)):
            assert all(count > 0 for count in counts), (rank, counts)
