"""``verify --device cuda`` without a card: CuPy is NumPy, and kernels are replaced by the layouts' own unpacking."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import trapetum
from trapetum.errors import KernelUnavailable
from trapetum.formats.planes import PlanesEntry, PlanesPart
from trapetum.formats.tiles import TILES
from trapetum.kernels.cuda.base import CudaLinear
from trapetum.kernels.cuda.linear import cuda_linear
from trapetum.kernels.cuda.ternary import TernaryLinear
from trapetum.kernels.cuda.workspace import Workspace
from trapetum.runtime.cuda.agreement import TOKENS, card_deviations
from trapetum.runtime.cuda.products import DenseCardMatrix
from trapetum.runtime.verify import verify_path
from trapetum.tensors import AdditiveTensor, CodebookTensor, QuantizedTensor, TernaryTensor

RNG = np.random.default_rng(3)


def decoded(linear: CudaLinear) -> np.ndarray:
    """The matrix that bytes on the card mean."""
    if isinstance(linear, TernaryLinear):
        shape = linear.rows, linear.in_features
        entry = PlanesEntry("w", (PlanesPart("w", shape),), 4)
        return entry.unpack(linear.data.reshape(entry.stored_shape), slice(None), ()).dequantize()
    return (
        TILES[linear.layout](linear.rows, linear.in_features, linear.entries).unpack(linear.data).dequantize()
    )


class Stand:
    """What kernels do, and a fault that one of them may have."""

    fault: Callable[[np.ndarray], None] | None = None
    products = 0

    def take(self, linear: Any, ids: np.ndarray, out: np.ndarray, stream: Any = None) -> None:
        out[:] = self.weights(linear)[ids]

    def multiply(self, linear: Any, x: np.ndarray, out: np.ndarray, stream: Any = None) -> None:
        self.products += 1
        out[:] = x.astype(np.float32) @ self.weights(linear).T

    def weights(self, linear: Any) -> np.ndarray:
        found = linear.weight if isinstance(linear, DenseCardMatrix) else decoded(linear)
        found = found.astype(np.float32)
        if self.fault is not None:
            self.fault(found)
        return found


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Stand:
    """A card made of NumPy."""
    cupy = ModuleType("cupy")
    runtime = SimpleNamespace(getDeviceCount=lambda: 1, CUDARuntimeError=RuntimeError)
    cupy.__dict__.update(
        cuda=SimpleNamespace(runtime=runtime),
        asnumpy=np.asarray,
        __version__="0",
        __getattr__=lambda n: getattr(np, n),
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    made = Stand()
    for kind in (CudaLinear, DenseCardMatrix):
        monkeypatch.setattr(kind, "take", lambda *arguments: made.take(*arguments))
        monkeypatch.setattr(kind, "multiply", lambda *arguments: made.multiply(*arguments))
    return made


def codebook(size: int, dtype: Any = np.float16) -> CodebookTensor:
    codes = RNG.integers(0, size, (70, 40), dtype=np.uint8)
    return CodebookTensor(codes, RNG.standard_normal((70, size)).astype(dtype))


TENSORS: dict[str, QuantizedTensor] = {
    "4 bits": codebook(16),
    "8 bits": codebook(200),
    "wide": codebook(16, np.float32),
    "additive": AdditiveTensor(
        RNG.integers(0, 256, (2, 5, 70), dtype=np.uint8),
        RNG.standard_normal((2, 256, 8)).astype(np.float16),
        RNG.uniform(0.5, 2, 70).astype(np.float16),
    ),
    "ternary": TernaryTensor(
        RNG.integers(0, 4, (33, 256), dtype=np.uint8), RNG.standard_normal((33, 2)).astype(np.float16), 4
    ),
    "ternary of 64": TernaryTensor(
        RNG.integers(0, 3, (33, 128), dtype=np.uint8), RNG.standard_normal((33, 2)).astype(np.float16)
    ),
}


@pytest.mark.parametrize("name", TENSORS)
def test_right_kernels_agree(name: str, stand: Stand) -> None:
    found = list(card_deviations(TENSORS[name], Workspace(), np.random.default_rng(0)))
    assert len(found) == 1 + len(TOKENS) == 1 + stand.products
    assert all(deviation <= limit for _, deviation, limit in found), found


@pytest.mark.parametrize("name", TENSORS)
def test_a_wrong_weight_shows(name: str, stand: Stand) -> None:
    def fault(weights: np.ndarray) -> None:
        weights[-1, -1] += np.abs(weights[-1]).max()

    stand.fault = fault
    found = list(card_deviations(TENSORS[name], Workspace(), np.random.default_rng(0)))
    assert found[0] == ("the card's decode", np.inf, 0.0)
    # One of 64 inputs is nearly zero at times; the worst of them is not.
    assert max(deviation for what, deviation, _ in found if "64 tokens" in what) > found[-1][2]


def test_what_is_not_written_shows(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand, "multiply", lambda *arguments: None)
    found = list(card_deviations(TENSORS["4 bits"], Workspace(), np.random.default_rng(0)))
    assert not any(deviation <= limit for what, deviation, limit in found if "product" in what)


def test_infinite_weights_do_not_warn(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand, "multiply", lambda linear, x, out: out.fill(0))
    tensor = codebook(16)
    tensor.codebook[:2, 0] = np.inf
    found = list(card_deviations(tensor, Workspace(), np.random.default_rng(0)))
    assert found[0] == ("the card's decode", 0.0, 0.0)
    assert not any(deviation <= limit for _, deviation, limit in found[1:])


def test_verify_compares_the_card(demo_model: Path, tmp_path: Path, stand: Stand) -> None:
    folder = trapetum.quantize_model(demo_model, tmp_path / "art", bits=4).out
    report = verify_path(folder, device="cuda")
    (check,) = (c for c in report.checks if c.name == "decoder")
    assert report.ok
    assert "decode alike, on the card, too, products" in check.detail
    before = stand.products
    assert before > len(TOKENS)
    assert verify_path(folder).ok
    assert stand.products == before

    def fault(weights: np.ndarray) -> None:
        weights[0, 0] = 1e3

    stand.fault = fault
    report = verify_path(folder, device="cuda")
    (check,) = (c for c in report.checks if c.name == "decoder")
    assert not report.ok
    assert "the card's decode differs" in check.detail


def test_without_a_card_verify_does_not_begin(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(KernelUnavailable, match="CuPy, which is not installed"):
        verify_path(demo_model, device="cuda")


@pytest.mark.usefixtures("stand")
@pytest.mark.parametrize(
    ("layout", "rows", "count", "entries", "nbytes"),
    [
        ("planes-v1", 3, 256, 0, 204),
        ("codebook4-v1", 3, 20, 16, 3072),
        ("codebook8-v1", 3, 20, 256, 68608),
        ("additive-v1", 3, 40, 2, 8736),
    ],
)
def test_bytes_of_another_matrix_are_refused(
    layout: str, rows: int, count: int, entries: int, nbytes: int
) -> None:
    data = np.zeros(nbytes, np.uint8)
    assert cuda_linear(layout, data, rows, count, entries).rows == rows
    for wrong in (data[1:], np.zeros(nbytes + 1, np.uint8)):
        with pytest.raises(
            ValueError, match=f"are no {layout} matrix of {rows} x {count}, which has {nbytes}$"
        ):
            cuda_linear(layout, wrong, rows, count, entries)
    with pytest.raises(ValueError, match=f"{layout} does not hold {rows} x {count} with 300 entries"):
        cuda_linear(layout, data, rows, count, 300)
    with pytest.raises(ValueError, match="does not hold 0 x"):
        cuda_linear(layout, data, 0, count, entries)


@pytest.mark.usefixtures("stand")
def test_a_layout_without_kernels_is_refused() -> None:
    with pytest.raises(
        ValueError, match="layout 'codebook4-v2' has no CUDA kernels; planes-v1, codebook4-v1,"
    ):
        cuda_linear("codebook4-v2", np.zeros(1, np.uint8), 1, 1)
