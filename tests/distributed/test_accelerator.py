"""What differs between GPUs of NVIDIA and AMD, and how ranks share GPUs.

There is no GPU here: torch.version.hip, the files of AMD's kernel driver, the number of GPUs and
the version of NCCL are mocks. Whether several ranks run on one GPU, tests/gpu/session.py tries.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from spmdrl_kernels import copies, lm_head_triton, switch
from spmdrl_kernels import device as kernel_device
from triton.runtime.jit import JITFunction

from spmdrl.config import ConfigError, RolloutConfig
from spmdrl.distributed import accelerator
from spmdrl.rollout.vllm.fp8 import check_fp8

GPU = torch.device("cuda", 0)


@pytest.fixture
def on_mi300(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What PyTorch's ROCm build says of an MI300X."""
    monkeypatch.setattr(torch.version, "hip", "7.0.51831")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 4))
    switch.can_run.cache_clear()
    yield
    switch.can_run.cache_clear()


class OnGpu:
    """As much of a tensor on a GPU as the choice of tiles asks for."""

    is_cuda, device, dtype = True, GPU, torch.bfloat16

    def element_size(self) -> int:
        return 2

    def stride(self, axis: int) -> int:
        return (1024, 1)[axis]

    def data_ptr(self) -> int:
        return 0


@pytest.mark.usefixtures("on_mi300")
def test_an_mi300_is_not_taken_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    assert accelerator.is_amd() and kernel_device.is_amd()
    assert not kernel_device.has_tensor_memory_accelerator(GPU)
    assert not lm_head_triton.tiles_for(OnGpu(), OnGpu()).tma
    assert kernel_device.dot_precision(exact=False) == "ieee"
    assert not switch.can_run(GPU)  # no kernel has run there yet
    switch.can_run.cache_clear()
    monkeypatch.setenv(kernel_device.ON_AMD, "1")
    assert switch.can_run(GPU)


def test_hopper_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert not accelerator.is_amd() and not kernel_device.is_amd()
    assert kernel_device.has_tensor_memory_accelerator(GPU) and kernel_device.triton_runs(GPU)
    assert lm_head_triton.tiles_for(OnGpu(), OnGpu()) == lm_head_triton.HOPPER[0]
    assert kernel_device.dot_precision(exact=False) == "tf32"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert not kernel_device.triton_runs(GPU)


def test_no_kernel_is_launched_on_another_gpu_than_its_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Triton launches on the current device, and asks no tensor for its own."""
    driver = inspect.getsource(JITFunction.run)
    assert "device = driver.active.get_current_device()" in driver
    monkeypatch.setattr(switch, "can_run", lambda device: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    tensor: Any = OnGpu()
    assert switch.on_triton(tensor) and copies.on_triton(tensor, tensor)
    monkeypatch.setattr(OnGpu, "device", torch.device("cuda", 1))
    for choose in (switch.on_triton, copies.on_triton):
        with pytest.raises(RuntimeError, match=r"on cuda:1, .* is cuda:0, .*set_device\(1\)"):
            choose(tensor)


@pytest.mark.usefixtures("on_mi300")
def test_fp8_is_refused_on_amd() -> None:
    config = RolloutConfig(quantization="fp8")
    with pytest.raises(ConfigError, match=r"quantization='fp8'.*AMD"):
        check_fp8(None, config)


def test_gpus_that_torch_cannot_use_are_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in accelerator.HIDES_GPUS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(accelerator, "NVIDIA_DRIVER", tmp_path / "nvidiactl")
    monkeypatch.setattr(accelerator, "AMD_NODES", tmp_path / "nodes")
    accelerator.check_no_gpu_is_left_out()
    for node, version in (("0", 0), ("1", 90012)):  # a processor, and graphics inside of one
        Path(tmp_path, "nodes", node).mkdir(parents=True)
        text = f"cpu_cores_count 16\ngfx_target_version {version}\n"
        Path(tmp_path, "nodes", node, "properties").write_text(text)
    accelerator.check_no_gpu_is_left_out()
    Path(tmp_path, "nodes/1/properties").write_text("simd_count 1216\ngfx_target_version 90402\n")
    with pytest.raises(ConfigError, match=r"AMD GPUs.*ROCm build.*HIP_VISIBLE_DEVICES= for a CPU"):
        accelerator.check_no_gpu_is_left_out()
    Path(tmp_path, "nvidiactl").touch()
    with pytest.raises(ConfigError, match=r"NVIDIA GPUs.*CUDA build.*CUDA_VISIBLE_DEVICES= for"):
        accelerator.check_no_gpu_is_left_out()
    for name, value in (("CUDA_VISIBLE_DEVICES", ""), ("HIP_VISIBLE_DEVICES", "-1")):
        monkeypatch.setenv(name, value)
        accelerator.check_no_gpu_is_left_out()
        monkeypatch.delenv(name)


def test_ranks_share_gpus_only_where_they_are_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    def devices(ranks: int) -> list[int | None]:
        return [accelerator.local_device(rank, ranks).index for rank in range(ranks)]

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(accelerator, "nccl_version", lambda: (2, 30, 7))
    monkeypatch.setenv(accelerator.SHARED_BY_NCCL, "")
    monkeypatch.delenv(accelerator.SHARED_BY_NCCL)
    monkeypatch.delenv(accelerator.SHARE_GPU, raising=False)
    assert devices(1) == [0] and devices(2) == [0, 1]
    with pytest.raises(ConfigError, match=r"4 ranks on this host, but 2 GPUs.*SPMDRL_SHARE_GPU=1"):
        devices(4)
    monkeypatch.setenv(accelerator.SHARE_GPU, "1")
    assert devices(2) == [0, 1] and accelerator.SHARED_BY_NCCL not in os.environ
    assert devices(4) == [0, 1, 0, 1] and devices(5) == [0, 1, 0, 1, 0]
    assert os.environ[accelerator.SHARED_BY_NCCL] == "1"
    monkeypatch.setattr(accelerator, "nccl_version", lambda: (2, 29, 7))
    with pytest.raises(ConfigError, match=r"needs NCCL 2\.30 or newer, and 2\.29\.7 is loaded"):
        devices(3)


def test_a_gpu_that_a_container_does_not_show_is_none(tmp_path: Path) -> None:
    """A folder in the file's place stands for one that may not be read."""
    assert not accelerator.is_amd_accelerator(tmp_path)
    (tmp_path / "properties").write_text("cpu_cores_count 0\ngfx_target_version 90402\n")
    assert accelerator.is_amd_accelerator(tmp_path / "properties")
