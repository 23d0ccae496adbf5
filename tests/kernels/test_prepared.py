"""Prepared matrices: exact decode against the stored tensor's, products against float64, the stated errors."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from trapetum.blocktypes import BLOCK_TYPES
from trapetum.kernels.cpu.activations import GROUP, padded
from trapetum.kernels.cpu.pool import Pool
from trapetum.kernels.cpu.prepare import prepare
from trapetum.kernels.cpu.prepared import Activations, Expanded, Prepared
from trapetum.tensors import AdditiveTensor, BlockTensor, CodebookTensor, DenseTensor, TernaryTensor

TWO_BITS = ("TQ1_0", "TQ2_0", "Q1_0", "Q2_0", "PQ2_0", "PTQ1_0")
INTEGER = (
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "IQ4_NL",
    "IQ4_XS",
    "MXFP4",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
)


def codebook(rows: int, width: int, entries: int, dtype: Any = np.float16) -> CodebookTensor:
    rng = np.random.default_rng(entries)
    codes = rng.integers(0, entries, (rows, width), dtype=np.uint8)
    return CodebookTensor(codes, rng.standard_normal((rows, entries)).astype(dtype))


def ternary(rows: int, width: int, group: int, dtype: Any = np.float16) -> TernaryTensor:
    rng = np.random.default_rng(group)
    scales = rng.standard_normal((rows, width // group)).astype(dtype)  # both signs
    scales[0, 0] = 0
    return TernaryTensor(rng.integers(0, 4, (rows, width), dtype=np.uint8), scales, 4)


def blocks(name: str, rows: int, width: int) -> BlockTensor:
    rng = np.random.default_rng(len(name))
    kind = BLOCK_TYPES[name]
    count = rows * width // kind.block_size
    parts = dict(kind.to_parts(rng.integers(0, 256, (count, kind.type_size), dtype=np.uint8)))
    for key in ("d", "dmin", "m"):
        if key in parts:
            parts[key] = (0.05 * rng.standard_normal(count)).astype(np.float16)
    if "e" in parts:
        parts["e"] = rng.integers(104, 144, count).astype(np.uint8)  # all powers of two that are a float16
        parts["e"][:2], parts["codes"][:2] = (0, 255), 8  # blocks of zeros
    if name in ("TQ1_0", "PTQ1_0"):
        parts["codes"] = rng.integers(0, 3, parts["codes"].shape, dtype=np.uint8)
    return BlockTensor(name, kind.from_parts(parts).reshape(rows, -1))


def additive(books: int, groups: int, rows: int) -> AdditiveTensor:
    rng = np.random.default_rng(books)
    return AdditiveTensor(
        rng.integers(0, 256, (books, groups, rows), dtype=np.uint8),
        rng.standard_normal((books, 256, 8)).astype(np.float16),
        rng.standard_normal(rows).astype(np.float16),
    )


def product(matrix: Prepared, x: np.ndarray, step: int | None = None) -> np.ndarray:
    out = np.full((x.shape[0], matrix.rows), np.nan, np.float32)
    form = matrix.activations(Activations(x))
    step = step or matrix.rows
    for begin in range(0, matrix.rows, step):
        matrix.multiply(form, out, begin, min(begin + step, matrix.rows))
    return out


def relative_error(found: np.ndarray, weights: np.ndarray, x: np.ndarray) -> float:
    exact = x.astype(np.float64) @ weights.astype(np.float64).T
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


def found(tensor: Any, **options: bool) -> Prepared:
    matrix = prepare(tensor, **options)
    assert matrix is not None
    assert (matrix.rows, matrix.in_features) == (tensor.rows, tensor.in_features)
    return matrix


def check_decode(matrix: Prepared, weights: np.ndarray) -> None:
    for begin, end in ((0, matrix.rows), (2, matrix.rows - 1)):
        out = np.full((end - begin, matrix.in_features), np.nan, np.float32)
        matrix.decode(out, begin)
        np.testing.assert_array_equal(out, weights[begin:end])


def normal(tokens: int, width: int) -> np.ndarray:
    return np.random.default_rng(tokens).standard_normal((tokens, width)).astype(np.float32)


# ---------------------------------------------------------------------------- one matrix of each kind
@pytest.mark.parametrize("width", [5, 64, 130, 512])
@pytest.mark.parametrize("entries", [2, 3, 16])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_codebook_of_16(width: int, entries: int, dtype: Any) -> None:
    tensor = codebook(9, width, entries, dtype)
    matrix, weights = found(tensor), tensor.dequantize()
    check_decode(matrix, weights)
    for tokens in (1, 3, 16):
        x = normal(tokens, width)
        assert relative_error(product(matrix, x), weights, x) <= 3e-4


@pytest.mark.parametrize("width", [5, 32, 130, 512])
@pytest.mark.parametrize("entries", [17, 256])
def test_codebook_of_256(width: int, entries: int) -> None:
    tensor = codebook(9, width, entries)
    weights = tensor.dequantize()
    table, expanded = found(tensor), found(tensor, expand=True)
    assert isinstance(expanded, Expanded)
    check_decode(table, weights)
    check_decode(expanded, weights)
    for tokens in (1, 3, 16):
        x = normal(tokens, width)
        assert relative_error(product(table, x), weights, x) <= 1e-6
        assert relative_error(product(expanded, x), weights, x) <= 3e-4


@pytest.mark.parametrize(("group", "width"), [(32, 96), (64, 320), (128, 384), (256, 512), (384, 768)])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_ternary(group: int, width: int, dtype: Any) -> None:
    tensor = ternary(40, width, group, dtype)
    weights = tensor.dequantize()
    fast, precise = found(tensor), found(tensor, precise=True)
    check_decode(fast, weights)
    for tokens in (1, 3, 16):
        x = normal(tokens, width)
        assert relative_error(product(fast, x), weights, x) <= 1.5e-2
        assert relative_error(product(precise, x), weights, x) <= 2e-4


@pytest.mark.parametrize("name", [*INTEGER, *TWO_BITS])
def test_blocks(name: str) -> None:
    small = BLOCK_TYPES[name].block_size == 32
    for width in (768, *((96,) if small else ())):
        tensor = blocks(name, 12, width)
        matrix, weights = found(tensor), tensor.dequantize()
        check_decode(matrix, weights)
        limit = 2e-2 if name in TWO_BITS else 2e-4
        for tokens in (1, 3, 16):
            x = normal(tokens, width)
            assert relative_error(product(matrix, x), weights, x) <= limit


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dense(dtype: str) -> None:
    rng = np.random.default_rng(0)
    tensor = DenseTensor(rng.standard_normal((9, 136)).astype(np.dtype(getattr(ml_dtypes, dtype, dtype))))
    matrix, weights = found(tensor), tensor.dequantize()
    check_decode(matrix, weights)
    for tokens in (1, 3, 16):
        x = normal(tokens, 136)
        assert relative_error(product(matrix, x), weights, x) <= 1e-6


@pytest.mark.parametrize("books", [1, 2, 3])
@pytest.mark.parametrize("rows", [20, 800])  # directly, and by table
def test_additive(books: int, rows: int) -> None:
    tensor = additive(books, 37, rows)
    matrix, weights = found(tensor), tensor.dequantize()
    check_decode(matrix, weights)
    for tokens in (1, 2, 5, 16):
        x = normal(tokens, 37 * 8)
        assert relative_error(product(matrix, x), weights, x) <= 1e-6


def test_what_no_kernel_takes_is_left_alone() -> None:
    rng = np.random.default_rng(0)
    assert prepare(DenseTensor(rng.standard_normal((4, 4)))) is None
    assert prepare(ternary(3, 48, 12)) is None
    beyond = np.full((2, 17), 0x11, np.uint8)
    beyond[:, 0] = 103  # the scale is no float16
    assert prepare(BlockTensor("MXFP4", beyond)) is None
    beyond[:, 0] = 104
    assert prepare(BlockTensor("MXFP4", beyond)) is not None
    assert prepare(BlockTensor("NVFP4", rng.integers(0, 256, (2, 36), dtype=np.uint8))) is None


# ---------------------------------------------------------------------------- accuracy as stated
def _outliers(x: np.ndarray, channels: int = 20, factor: float = 40.0) -> np.ndarray:
    x = x.copy()
    x[:, np.random.default_rng(7).choice(x.shape[1], channels, replace=False)] *= np.float32(factor)
    return x


@pytest.mark.parametrize(
    ("shape", "fast", "precise", "sixteen"),
    [("gauss", 1e-2, 2e-4, 3e-4), ("laplace", 1e-2, 2e-4, 3e-4), ("outliers", 3e-2, 2e-4, 3e-4)],
)
def test_errors_at_4096_inputs(shape: str, fast: float, precise: float, sixteen: float) -> None:
    rng = np.random.default_rng(3)
    x = (rng.laplace(size=(4, 4096)) if shape == "laplace" else rng.standard_normal((4, 4096))).astype(
        np.float32
    )
    if shape == "outliers":
        x = _outliers(x)
    two_bits, four_bits = ternary(256, 4096, 128), codebook(256, 4096, 16)
    cases = ((two_bits, False, fast), (two_bits, True, precise), (four_bits, False, sixteen))
    for tensor, exact, limit in cases:
        matrix = found(tensor, precise=exact)
        assert relative_error(product(matrix, x), tensor.dequantize(), x) <= limit


@pytest.mark.parametrize("group", [32, 64, 128, 256])
def test_ternary_equals_its_integer_reference(group: int) -> None:
    tensor = ternary(64, 1024, group)
    x = _outliers(normal(3, 1024))
    q, scales, _ = Activations(x).bytes(GROUP, precise=False)  # in natural order
    rounded = (q.reshape(3, -1, GROUP) * scales[:, :, None].astype(np.float64)).reshape(3, -1)
    exact = rounded @ tensor.dequantize().astype(np.float64).T
    difference = np.linalg.norm(product(found(tensor), x) - exact)
    assert difference <= 1e-6 * np.linalg.norm(exact)


def test_largest_integers_do_not_overflow() -> None:
    # every product is 8191 x 16383, or -8191 x 16383: one more bit anywhere would wrap
    for sign in (1, -1):
        table = np.array([[sign, 0.5]], np.float16)
        tensor = CodebookTensor(np.zeros((1, 1024), np.uint8), table)
        x = np.ones((2, 1024), np.float32)
        for matrix in (found(tensor), Expanded(tensor.codes, tensor.codebook)):
            np.testing.assert_allclose(product(matrix, x), sign * 1024.0, rtol=1e-6)
    four = TernaryTensor(np.full((1, 1024), 3, np.uint8), np.ones((1, 8), np.float16), 4)
    for sign in (1, -1):
        for precise in (False, True):
            y = product(found(four, precise=precise), np.full((2, 1024), sign, np.float32))
            np.testing.assert_allclose(y, sign * 2048.0, rtol=1e-6)


# ---------------------------------------------------------------------------- activations
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_activations_that_are_not_finite_show(bad: float) -> None:
    x = normal(2, 256)
    x[1, 200] = bad
    for tensor in (codebook(3, 256, 16), ternary(3, 256, 128), blocks("Q4_K", 3, 256)):
        y = product(found(tensor), x)
        assert np.isfinite(y[0]).all()
        assert np.isnan(y[1]).all()


def test_extreme_activations() -> None:
    tensor = codebook(5, 256, 16)
    matrix, weights = found(tensor), tensor.dequantize()
    assert not product(matrix, np.zeros((1, 256), np.float32)).any()
    for factor in (1e30, 1e-30):
        x = (normal(2, 256) * factor).astype(np.float32)
        assert relative_error(product(matrix, x), weights, x) <= 3e-4
    assert not product(matrix, np.full((1, 256), 1e-40, np.float32)).any()


def test_activations_are_padded_with_zeros() -> None:
    made = Activations(np.ones((2, 130), np.float32))
    q, _ = made.words
    assert q.shape == (2, padded(130))
    assert (q[:, :130] == 16383).all()
    assert not q[:, 130:].any()
    np.testing.assert_allclose(made.sums(32)[:, :5], np.array([[32, 32, 32, 32, 2]] * 2), rtol=1e-6)


# ---------------------------------------------------------------------------- threads
def test_same_bits_at_any_thread_count_and_from_several_threads() -> None:
    x = normal(2, 512)
    for matrix in (
        found(codebook(300, 512, 16)), found(codebook(300, 512, 256)), found(ternary(300, 512, 128)),
        found(ternary(300, 512, 128), precise=True), found(blocks("Q6_K", 300, 512)), found(additive(2, 64, 800)),
    ):  # fmt: skip
        expected = product(matrix, x)
        form = matrix.activations(Activations(x))
        for threads in (2, 8):
            out = np.full_like(expected, np.nan)
            Pool(threads).blocks(
                lambda r, m=matrix, o=out, f=form: m.multiply(f, o, r.start, r.stop), matrix.rows, 64
            )
            np.testing.assert_array_equal(out, expected)
        with ThreadPoolExecutor(4) as several:
            for out in several.map(lambda _, m=matrix: product(m, x, 37), range(8)):
                np.testing.assert_array_equal(out, expected)
