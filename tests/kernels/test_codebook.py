"""Codebook decode and products of every matrix class against the NumPy decode and float64."""

from __future__ import annotations

import numpy as np
import pytest

from trapetum.kernels.cpu.codebook import decode_rows
from trapetum.kernels.cpu.pool import Pool
from trapetum.runtime.matrix import DenseMatrix, PreparedMatrix, build_matrix, widen
from trapetum.tensors import CodebookTensor, DenseTensor


def random_tensor(rows: int, width: int, entries: int, seed: int = 0) -> CodebookTensor:
    rng = np.random.default_rng(seed)
    return CodebookTensor(
        rng.integers(0, entries, (rows, width), dtype=np.uint8),
        rng.standard_normal((rows, entries)).astype(np.float16),
    )


@pytest.mark.parametrize(("rows", "width", "entries"), [(1, 1, 2), (5, 7, 3), (33, 64, 16), (20, 130, 256)])
def test_decode_is_exact(rows: int, width: int, entries: int) -> None:
    t = random_tensor(rows, width, entries)
    out = np.full((rows, width), np.nan, np.float32)
    decode_rows(t.codes, t.codebook.astype(np.float32), out)
    np.testing.assert_array_equal(out, t.dequantize())


@pytest.mark.parametrize("tokens", [1, 8, 9, 70, 1100])
@pytest.mark.parametrize("kind", ["codebook", "dense"])
def test_same_bits_at_any_thread_count(tokens: int, kind: str) -> None:
    # 2 M weights: several pieces by rows with few and many tokens, and by tokens at 1100
    t = random_tensor(1030, 2048, 16)
    tensor = t if kind == "codebook" else DenseTensor(t.dequantize())
    x = np.random.default_rng(2).standard_normal((tokens, 2048)).astype(np.float32)
    results = []
    for threads in (1, 2, 8):
        pool = Pool(threads)
        with pool.session():
            results.append(build_matrix(tensor, pool)(x))
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])
    exact = x.astype(np.float64) @ t.dequantize().astype(np.float64).T
    assert np.linalg.norm(results[0] - exact) <= 1e-6 * np.linalg.norm(exact)


def test_every_matrix_looks_up_rows() -> None:
    t = random_tensor(9, 12, 5)
    ids = np.array([8, 0, 0, 3])
    for tensor in (t, DenseTensor(t.dequantize()), DenseTensor(t.dequantize().astype(np.float16))):
        for expand in (True, False):
            rows = build_matrix(tensor, Pool(1), expand=expand).look_up(ids)
            assert rows.dtype == np.float32
            np.testing.assert_array_equal(rows, t.dequantize()[ids])


def test_dense_matrix_kept_narrow_gives_the_same_bits() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    rng = np.random.default_rng(3)
    values = rng.standard_normal((300, 64)).astype(ml_dtypes.bfloat16)
    x = rng.standard_normal((5, 64)).astype(np.float32)
    narrow = DenseMatrix(DenseTensor(values), Pool(1), expand=False)
    wide = DenseMatrix(DenseTensor(values), Pool(1), expand=True)
    assert narrow.values.dtype == values.dtype
    assert wide.values.dtype == np.float32
    np.testing.assert_array_equal(narrow(x), wide(x))


def test_layouts_pick_their_class() -> None:
    assert type(build_matrix(random_tensor(2, 4, 4), Pool(1))) is PreparedMatrix
    assert type(build_matrix(DenseTensor(np.zeros((2, 4), np.float32)), Pool(1))) is DenseMatrix


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float64", "float32", "float8_e4m3fn"])
def test_widening_is_exact(name: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    values = np.array([0.0, -0.0, 1.0, -1.5, 0.0078125, 240.0, np.inf, np.nan]).astype(dtype)
    wide = widen(values)
    assert wide.dtype == np.float32
    np.testing.assert_array_equal(wide, values.astype(np.float32))
    np.testing.assert_array_equal(np.signbit(wide), np.signbit(values.astype(np.float32)))


def test_values_in_any_order_and_read_only() -> None:
    values = np.random.default_rng(5).standard_normal((40, 70)).astype(np.float32)
    x = np.random.default_rng(6).standard_normal((20, 40)).astype(np.float32)
    turned, fixed = DenseTensor(values.T), DenseTensor(np.ascontiguousarray(values.T))
    fixed.values.setflags(write=False)
    for tensor in (turned, fixed):
        np.testing.assert_allclose(build_matrix(tensor, Pool(1))(x), x @ values, rtol=1e-5, atol=1e-5)


def test_any_layout_works_through_its_exact_decode() -> None:
    from trapetum.runtime.matrix import Matrix

    t = random_tensor(70, 32, 16)
    matrix = Matrix(t, Pool(1))
    for tokens in (3, 20):
        x = np.random.default_rng(4).standard_normal((tokens, 32)).astype(np.float32)
        np.testing.assert_allclose(matrix(x), x @ t.dequantize().T, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(matrix.look_up(np.array([69, 1])), t.dequantize()[[69, 1]])
