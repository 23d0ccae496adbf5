"""What Triton's compiler makes of the kernels, without a card. Run by test_triton.py, in a process of its own.

The module's own host code runs, with a driver that only tells the compiler which card it is for; instead of being
launched, kernels are compiled.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget

from trapetum.errors import KernelUnavailable
from trapetum.kernels.triton import pq2

KERNELS = (pq2.quantize_activations, pq2.multiply, pq2.add_up)
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
CAPABILITIES = [80, 90, *(pytest.param(capability, marks=pytest.mark.slow) for capability in (89, 100, 120))]

# Products of bytes on tensor cores, where a generation has instructions of its own.
PRODUCTS = {90: r"wgmma\.mma_async\S*m64n\d+k32\.s32\.s8\.s8", 100: r"tcgen05\.mma\S*kind::i8"}


class Driver:
    """A card of a compute capability, for the compiler only."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


@pytest.fixture
def on_card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Call it with a compute capability: kernels are compiled for it from then on."""
    run = triton.JITFunction.run
    monkeypatch.setattr(
        triton.JITFunction, "run", lambda self, *a, **k: run(self, *a, **(k | {"warmup": True}))
    )
    monkeypatch.setattr(pq2, "_check_device", lambda device: None)
    config = triton.runtime.driver

    def begin(capability: int) -> None:
        monkeypatch.setattr(config, "_active", Driver(capability))
        for kernel in KERNELS:
            kernel.device_caches.pop(capability, None)

    return begin


def compiled(kernel: Any, capability: int) -> list[Any]:
    """What has been compiled of a kernel for a card."""
    return list(kernel.device_caches[capability][0].values())


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_one_kernel_a_path_for_all_numbers_of_tokens(
    capability: int, dtype: torch.dtype, on_card: Any
) -> None:
    on_card(capability)
    first = pq2.Pq2Linear(torch.zeros(4096, 34 * 32, dtype=torch.uint8))
    first.warm_up(dtype)
    counts = [len(compiled(kernel, capability)) for kernel in KERNELS]
    assert counts == [1, 2, 1]  # few tokens and many are one kernel of two sizes
    for rows, groups in ((4096, 32), (1, 1), (33, 3), (300, 17), (70000, 2)):
        planes = torch.zeros(rows, 34 * groups, dtype=torch.uint8)
        for tokens in (*range(1, 41), 127, 128, 129, 255, 256, 1000):
            pq2.pq2_linear(torch.zeros(tokens, 128 * groups, dtype=dtype), planes)
    assert [len(compiled(kernel, capability)) for kernel in KERNELS] == counts

    for kernel in KERNELS:
        for made in compiled(kernel, capability):
            used = resources(made.asm["cubin"])
            assert used["STACK"] == used["LOCAL"] == 0, (kernel.__name__, used)  # no register is spilled
            assert made.metadata.shared <= 99 * 1024  # what a block may have on every card from 8.0 on
    for made in compiled(pq2.multiply, capability):
        assert re.search(
            PRODUCTS.get(capability, r"mma\.sync\S*\.m16n8k32\S*\.s32\.s8\.s8\.s32"), made.asm["ptx"]
        )
        assert "fma.rn.f32" in made.asm["ptx"]
    rounding = "cvt.rn.bf16" if dtype == torch.bfloat16 else "cvt.rn.f16"
    (ptx,) = (made.asm["ptx"] for made in compiled(pq2.add_up, capability))
    assert rounding in ptx
    (ptx,) = (made.asm["ptx"] for made in compiled(pq2.quantize_activations, capability))
    assert "div.rn.f32" in ptx
    assert "ftz" not in ptx  # subnormal scales count


def resources(cubin: bytes) -> dict[str, int]:
    """Registers, stack and local memory, as NVIDIA's tool reads them from the machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run(
            [CUOBJDUMP, "-res-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", told)}


def test_another_dtype_or_alignment_is_what_compiles(on_card: Any) -> None:
    """The count above can fail: it sees what it should see."""
    on_card(80)
    planes = torch.zeros(8, 34, dtype=torch.uint8)
    pq2.pq2_linear(torch.zeros(1, 128, dtype=torch.float16), planes)
    pq2.pq2_linear(torch.zeros(1, 128, dtype=torch.bfloat16), planes, torch.float16)
    assert len(compiled(pq2.quantize_activations, 80)) == 2
    assert len(compiled(pq2.multiply, 80)) == 1
    shifted = torch.zeros(129, dtype=torch.float16)[1:].reshape(1, 128)
    pq2.pq2_linear(shifted, planes)
    assert len(compiled(pq2.quantize_activations, 80)) == 2


def test_the_cpu_is_refused_outside_the_interpreter() -> None:
    with pytest.raises(
        KernelUnavailable, match="on the device cpu; the Triton kernels run on CUDA devices"
    ) as caught:
        pq2.pq2_linear(torch.zeros(1, 128, dtype=torch.float16), torch.zeros(1, 34, dtype=torch.uint8))
    assert "TRITON_INTERPRET=1" in (caught.value.hint or "")


def test_an_old_card_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pq2, "_capability", lambda index: (7, 5))
    with pytest.raises(KernelUnavailable, match=r"cuda:0 has compute capability 7\.5; .* need 8\.0 or newer"):
        pq2._check_device(torch.device("cuda", 0))
