"""Encoders of GGUF block types: against llama.cpp's own, against exhaustive search, on degenerate blocks."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from trapetum.blocktypes import BLOCK_TYPES
from trapetum.blocktypes.simple import IQ4_VALUES
from trapetum.errors import RecipeError
from trapetum.quantize.block_passes import LANES
from trapetum.quantize.block_search import SEARCHES, fit_blocks


def draw(kind: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    values = {
        "gauss": lambda: rng.standard_normal((rows, columns)),
        "t4": lambda: rng.standard_t(4, (rows, columns)),
        # Columns of very different size, as transformers have
        "outlier": lambda: rng.standard_normal((rows, columns)) * np.exp(rng.standard_normal(columns)),
    }[kind]()
    return (0.02 * values).astype(np.float32)


def importance(columns: int, seed: int = 1) -> np.ndarray:
    return np.exp(1.5 * np.random.default_rng(seed).standard_normal(columns))


def error(weight: np.ndarray, decoded: np.ndarray, h: np.ndarray | None = None) -> float:
    w = np.ones(weight.shape[1]) if h is None else h
    x = weight.astype(np.float64)
    return float((w * (x - decoded) ** 2).sum() / (w * x**2).sum())


@pytest.fixture(scope="module")
def llama_quantize() -> object:
    """llama.cpp's own quantizer, from the xllamacpp wheel."""
    spec = find_spec("xllamacpp")
    found = sorted(Path(spec.origin).parent.glob("*.so")) if spec and spec.origin else []
    if not found:
        pytest.skip("xllamacpp is not installed")
    function = ctypes.CDLL(str(found[0])).ggml_quantize_chunk
    function.restype = ctypes.c_size_t
    function.argtypes = [ctypes.c_int, *2 * [ctypes.c_void_p], *3 * [ctypes.c_int64], ctypes.c_void_p]

    def quantize(weight: np.ndarray, name: str, h: np.ndarray | None) -> np.ndarray:
        entry = BLOCK_TYPES[name]
        out = np.empty((len(weight), entry.row_bytes(weight.shape[1])), np.uint8)
        matrix = None if h is None else h.astype(np.float32)
        pointer = None if matrix is None else matrix.ctypes.data
        size = function(entry.id, weight.ctypes.data, out.ctypes.data, 0, *weight.shape, pointer)
        assert size == out.nbytes
        return entry.decode(out)

    return quantize


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", [name for name in SEARCHES if BLOCK_TYPES[name].id < 100])
def test_at_least_as_accurate_as_llama_cpp(name: str, weighted: bool, llama_quantize: object) -> None:
    for kind in ("gauss", "t4", "outlier"):
        weight = draw(kind, 32, 1024)
        h = importance(1024) if weighted else None
        ours = error(weight, fit_blocks(weight, name, h).dequantize(), h)
        theirs = error(weight, llama_quantize(weight, name, h), h)  # type: ignore[operator]
        assert ours <= theirs * (1 + 1e-6), f"{kind}: {ours} against {theirs}"


def exhaustive(weight: np.ndarray, grid: np.ndarray) -> float:
    """Least squared error over a fine range of float16 scales of either sign, in float64."""
    total = 0.0
    for row in weight.astype(np.float64):
        peak = np.abs(row).max() / np.abs(grid).max()
        d = np.concatenate([np.linspace(0.6, 1.6, 1500) * peak * sign for sign in (1, -1)])
        d = np.unique(d.astype(np.float16)).astype(np.float64)
        edges = (grid[1:] + grid[:-1]) / 2
        q = grid[np.searchsorted(edges, row[None] / d[:, None])]
        total += ((row - d[:, None] * q) ** 2).sum(axis=1).min()
    return total


@pytest.mark.parametrize(
    ("name", "grid", "slack"),
    [
        ("Q4_0", np.arange(-8.0, 8), 1.005),
        ("Q5_0", np.arange(-16.0, 16), 1.02),
        ("Q8_0", np.arange(-127.0, 128), 1.08),
        ("IQ4_NL", IQ4_VALUES.astype(np.float64), 1.005),
    ],
)
def test_near_the_exhaustive_optimum(name: str, grid: np.ndarray, slack: float) -> None:
    weight = draw("gauss", 100, 32)
    ours = ((weight.astype(np.float64) - fit_blocks(weight, name).dequantize()) ** 2).sum()
    assert ours <= slack * exhaustive(weight, grid)


GRIDS = {
    "Q4_0": np.arange(-8, 8),
    "Q5_0": np.arange(-16, 16),
    "Q8_0": np.arange(-127, 128),
    "Q4_1": np.arange(16) + 3,
    "Q5_1": np.arange(32) - 5,
    "IQ4_NL": IQ4_VALUES,
    "Q3_K": np.arange(-4, 4),
    "Q2_0": np.arange(-1, 3),
    "PQ2_0": np.arange(-2, 2),
    "PTQ1_0": np.arange(-1, 2),
    "TQ2_0": np.arange(-1, 2),
}


@pytest.mark.parametrize("name", GRIDS)
def test_weights_on_a_grid_of_the_type_come_back_exactly(name: str) -> None:
    grid = GRIDS[name]
    chosen = np.random.default_rng(5).choice(grid, (4, 256))
    chosen[:, ::16], chosen[:, 1::16] = grid[0], grid[-1]
    weight = (chosen * 2.0**-7).astype(np.float32)
    np.testing.assert_array_equal(fit_blocks(weight, name).dequantize(), weight)


DEGENERATE = {
    "zeros": np.zeros(256),
    "negative zeros": np.full(256, -0.0),
    "constant": np.full(256, 0.25),
    "negative constant": np.full(256, -0.25),
    "one value": np.eye(1, 256, 7)[0],
    "tiny": np.linspace(-1e-9, 1e-9, 256),
    "subnormal": np.linspace(-1e-44, 1e-44, 256),
    "huge": np.linspace(-65504, 65504, 256),
    "far from zero": 100 + np.linspace(-1e-3, 1e-3, 256),
    "an outlier": np.r_[np.linspace(-1e-3, 1e-3, 255), 1000.0],
}


@pytest.mark.parametrize("case", DEGENERATE)
@pytest.mark.parametrize("name", SEARCHES)
def test_degenerate_blocks_stay_finite_and_near(name: str, case: str) -> None:
    weight = DEGENERATE[case].astype(np.float32)[None]
    decoded = fit_blocks(weight, name, importance(256)).dequantize()
    assert np.isfinite(decoded).all()
    # Never worse than all zeros would be, but for the half step of a float16 that is subnormal.
    slack = 0 if name != "Q1_0" else 256 * 2.0**-24
    assert np.abs(weight - decoded).max() <= np.abs(weight).max() + slack
    if not weight.any() and name != "Q1_0":
        assert not decoded.any()


def test_a_block_far_from_zero_keeps_its_differences() -> None:
    weight = (100 + np.random.default_rng(0).standard_normal((8, 256)) * 0.25).astype(np.float32)
    residual = weight - fit_blocks(weight, "Q4_1").dequantize()
    assert np.abs(residual).max() < 0.1


@pytest.mark.parametrize("name", SEARCHES)
def test_results_do_not_depend_on_neighbours_or_threads(name: str) -> None:
    rows = 301
    assert rows * 512 / 32 > 2 * LANES  # several tiles, the last one not full
    weight, h = draw("t4", rows, 512), importance(512)
    whole = fit_blocks(weight, name, h).blocks
    cuts = [0, 1, 7, rows // 2, rows]
    with ThreadPoolExecutor(3) as pool:
        parts = pool.map(lambda span: fit_blocks(weight[slice(*span)], name, h).blocks, pairwise(cuts))
        np.testing.assert_array_equal(np.concatenate(list(parts)), whole)


def test_importance_moves_the_error_where_it_counts() -> None:
    weight, h = draw("gauss", 16, 512), np.ones(512)
    h[::4] = 100
    plain, weighted = (fit_blocks(weight, "Q4_K", i).dequantize() for i in (None, h))
    assert error(weight, weighted, h) < 0.8 * error(weight, plain, h)
    assert error(weight, weighted) > error(weight, plain)
    np.testing.assert_array_equal(
        fit_blocks(weight, "Q4_K", np.zeros(512)).blocks, fit_blocks(weight, "Q4_K").blocks
    )


def test_inputs_that_cannot_be_encoded_are_refused() -> None:
    with pytest.raises(ValueError, match="a row of 320 weights is not a multiple of TQ2_0"):
        fit_blocks(np.zeros((1, 320)), "TQ2_0")
    for bad in (np.nan, np.inf, 1e5):
        with pytest.raises(ValueError, match="holds finite weights up to 65504"):
            fit_blocks(np.full((1, 32), bad), "Q4_0")
    with pytest.raises(RecipeError, match="no encoder for IQ2_XS"):
        fit_blocks(np.zeros((1, 256)), "IQ2_XS")
    for h, message in [
        (np.ones(31), "has shape"),
        (np.full(32, -1.0), "negative"),
        (np.full(32, np.nan), "non-finite"),
    ]:
        with pytest.raises(RecipeError, match=message):
            fit_blocks(np.zeros((1, 32)), "Q4_0", h)


def test_empty_matrices() -> None:
    assert fit_blocks(np.zeros((0, 256)), "Q4_K").shape == (0, 256)
    assert fit_blocks(np.zeros((0, 256)), "TQ2_0").shape == (0, 256)
