"""The fast codebook search against exact dynamic programming, and the promises about rows, dtypes, signs, threads."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trapetum.quantize
from trapetum.errors import RecipeError
from trapetum.quantize.kmeans import fit_codebooks, needs_wide_codebook, optimal_codebook, relative_error

BF16 = ml_dtypes.bfloat16
DTYPES = (BF16, np.float16, np.float32)


def rows_of(kind: str, rows: int, n: int, seed: int = 0) -> np.ndarray:
    """Rows of the weight-like distributions that the promises are about, standard deviation about 0.02."""
    rng = np.random.default_rng([seed, n])
    x = {
        "gauss": lambda: rng.standard_normal((rows, n)),
        "laplace": lambda: rng.laplace(size=(rows, n)),
        "t5": lambda: rng.standard_t(5, (rows, n)),
        "t3": lambda: rng.standard_t(3, (rows, n)),
        "outlier": lambda: rng.standard_normal((rows, n)),
    }[kind]()
    if kind == "outlier":
        x[:, n // 3] = 20.0 * rng.choice([-1, 1], rows)
    return x * 0.02


KINDS = ("gauss", "laplace", "t5", "t3", "outlier")


def excess(
    weight: np.ndarray, k: int, importance: np.ndarray | None = None, effort: str = "default"
) -> np.ndarray:
    """Stored error over the exact optimum, less 1, by row; errors computed here, from the decoded values."""
    codes, codebook = fit_codebooks(weight, k, importance, effort)
    w = weight.astype(np.float64)
    h = np.ones(w.shape[1]) if importance is None else importance
    error = (
        h * (w - np.take_along_axis(codebook.astype(np.float64), codes.astype(np.intp), axis=1)) ** 2
    ).sum(axis=1)
    best = np.array([optimal_codebook(row, k, h)[1] for row in w])
    return error / best - 1.0


def check_row_promises(weight: np.ndarray, k: int, importance: np.ndarray | None = None) -> bool:
    """Everything that must hold for any finite rows whatever; returns whether they needed a wide codebook."""
    wide = needs_wide_codebook(weight, k)
    codes, codebook = fit_codebooks(weight, k, importance, wide=wide)
    w, table = weight.astype(np.float64), codebook.astype(np.float64)
    assert codebook.dtype == (np.float32 if wide else np.float16)
    assert codebook.shape == (len(w), k)
    assert np.isfinite(table).all()
    assert (np.diff(table, axis=1) >= 0).all()
    assert not np.signbit(table[table == 0]).any()
    distance = np.abs(w[:, :, None] - table[:, None, :])
    np.testing.assert_array_equal(codes, distance.argmin(axis=2))  # nearest, the first of equals
    decoded = np.take_along_axis(table, codes.astype(np.intp), axis=1)
    for row, back, entries in zip(w, decoded, table, strict=True):
        if np.unique(row).size <= k:
            np.testing.assert_array_equal(back, row)
            assert set(entries) <= set(row)  # unused entries repeat existing values
    sse, squares = relative_error(weight, codes, codebook)
    np.testing.assert_allclose(sse, ((w - decoded) ** 2).sum(axis=1), rtol=1e-12)
    np.testing.assert_allclose(squares, (w**2).sum(axis=1), rtol=1e-12)
    return wide


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [4, 8, 16, 32])
def test_near_optimum(kind: str, k: int) -> None:
    e = excess(rows_of(kind, 8, 1024).astype(BF16), k)
    assert e.mean() <= 0.003
    assert e.max() <= 0.02


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("k", "effort", "limit"), [(64, "default", 0.01), (256, "default", 0.2), (256, "high", 0.01)]
)
def test_near_optimum_large_codebooks(kind: str, k: int, effort: str, limit: float) -> None:
    e = excess(rows_of(kind, 3, 1024).astype(BF16), k, effort=effort)
    assert e.mean() <= limit


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [512, 2048, 4096, 11008])
@pytest.mark.parametrize("dtype", DTYPES)
def test_near_optimum_matrix(kind: str, n: int, dtype: Any) -> None:
    weight = rows_of(kind, 24, n, seed=1).astype(dtype)
    for k in (4, 8, 16, 32):
        e = excess(weight, k)
        assert e.mean() <= 0.003, k
        assert e.max() <= 0.02, k
    assert excess(weight, 64).mean() <= 0.01
    assert excess(weight[:6], 256).mean() <= 0.2
    if (
        dtype is BF16 or n > 1024
    ):  # at 2 float32 values an entry, rounding the entries to float16 alone costs 1.5 %
        assert excess(weight[:6], 256, effort="high").mean() <= 0.01


@pytest.mark.parametrize("kind", ["gauss", "t3"])
def test_importance_is_minimised(kind: str) -> None:
    h = np.exp(np.random.default_rng(3).standard_normal(1024))
    weight = rows_of(kind, 6, 1024).astype(BF16)
    e = excess(weight, 16, h)
    assert e.mean() <= 0.003
    assert excess(weight, 16, 7.5 * h).mean() == pytest.approx(
        e.mean(), abs=1e-9
    )  # the scale of h does not matter


def test_weighted_optimum_against_sklearn() -> None:
    from sklearn.cluster import KMeans

    rng = np.random.default_rng(4)
    x = rng.standard_normal(60)
    w = rng.random(60) + 0.1
    best = min(
        KMeans(4, n_init=20, random_state=s).fit(x[:, None], sample_weight=w).inertia_ for s in range(2)
    )
    centroids, sse = optimal_codebook(x, 4, w)
    assert sse == pytest.approx(best, rel=1e-9)
    assert ((x[:, None] - centroids).__abs__().min(axis=1) ** 2 * w).sum() == pytest.approx(sse, rel=1e-12)


@pytest.mark.parametrize(
    ("values", "k", "expected"),
    [
        ([0.0, 1.0, 10.0, 12.0], 2, [0.5, 11.0]),
        ([3.0, 3.0, 3.0], 2, [3.0]),
        ([1.0, 2.0, 4.0], 3, [1.0, 2.0, 4.0]),
    ],
)
def test_optimal_codebook_by_hand(values: list[float], k: int, expected: list[float]) -> None:
    assert optimal_codebook(np.array(values), k)[0].tolist() == expected


def test_optimal_codebook_by_enumeration() -> None:
    from itertools import combinations

    x = np.sort(np.random.default_rng(5).standard_normal(11))
    w = np.random.default_rng(6).random(11) + 0.1

    def cost(a: int, b: int) -> float:
        c = np.average(x[a:b], weights=w[a:b])
        return float((w[a:b] * (x[a:b] - c) ** 2).sum())

    for k in (2, 3, 5):
        cuts = [(0, *c, 11) for c in combinations(range(1, 11), k - 1)]
        best = min(sum(cost(a, b) for a, b in zip(c, c[1:])) for c in cuts)  # noqa: RUF007
        assert optimal_codebook(x, k, w)[1] == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("effort", ["fast", "default", "high"])
@pytest.mark.parametrize("k", [2, 4, 16, 64])
def test_hardly_more_values_than_entries(k: int, effort: str) -> None:
    """Here pruning is sharpest and float32 costs are weakest; a wrong cluster would cost a large factor."""
    rng = np.random.default_rng(k)
    for extra in (1, 2, 3, 7):
        for _ in range(12):
            values = rng.standard_normal(k + extra)
            values[1] = values[0] + 10.0 ** rng.uniform(-6, -1)
            row = rng.choice(values, (1, 600)).astype(np.float32)
            codes, codebook = fit_codebooks(row, k, effort=effort, wide=True)
            error = relative_error(row, codes, codebook)[0][0]
            # 1e-12 of the row's energy is what float64 prefix sums can tell apart.
            assert error <= 1.003 * optimal_codebook(row, k)[1] + 1e-12 * (row.astype(np.float64) ** 2).sum()


@pytest.mark.parametrize("effort", ["fast", "default"])
def test_shapes_far_from_weights(effort: str) -> None:
    rng = np.random.default_rng(8)
    n = 2000
    rows = np.stack(
        [
            rng.standard_normal(n) * (rng.random(n) < 0.3),  # sparse
            rng.choice(rng.standard_normal(20), n) + 1e-3 * rng.standard_normal(n),  # tight clumps
            rng.random(n),
            np.exp(2 * rng.standard_normal(n)),
            rng.standard_normal(n) * 0.05 + rng.choice([-1, 1], n),
            rng.standard_cauchy(n),
            np.where(rng.random(n) < 0.01, 30, 1) * rng.standard_normal(n),
        ]
    ).astype(BF16)
    for k in (4, 8, 16, 32):
        assert excess(rows, k, effort=effort).max() <= (0.02 if effort == "default" else 0.06)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [2, 3, 16, 256])
@pytest.mark.parametrize("n", [1, 2, 15, 17, 300])
def test_row_promises(dtype: Any, k: int, n: int) -> None:
    rng = np.random.default_rng([k, n])
    gauss = (rng.standard_normal((3, n)) * 0.02).astype(dtype)
    sparse = gauss.copy()
    sparse[:, ::3], sparse[:, 1::5] = 0.0, -0.0
    h = rng.random(n)
    h[n // 2] = 0.0
    for weight in (
        gauss,
        sparse,
        np.round(rng.standard_normal((3, n)) * 2).astype(dtype),
        np.full((2, n), 0.3, dtype),
    ):
        check_row_promises(weight, k)
        check_row_promises(weight, k, h)
    assert not check_row_promises(np.zeros((2, n), dtype), k)
    assert not check_row_promises(np.full((2, n), -0.0, dtype), k)


@pytest.mark.parametrize("value", [3.3895314e38, 70000.0, 1e-9, 3e-12, 2.0**-133])
@pytest.mark.parametrize("dtype", [BF16, np.float32])
def test_extreme_magnitudes(value: float, dtype: Any) -> None:
    signs = np.where(np.arange(200) % 3 == 0, -1, 1)
    assert check_row_promises((value * signs)[None].astype(dtype), 16)
    assert check_row_promises((value * np.random.default_rng(0).random((2, 300))).astype(dtype), 16)


@settings(max_examples=150, deadline=None)
@given(
    data=st.lists(
        st.one_of(
            st.integers(0, 0xFFFF),
            st.sampled_from([0x0000, 0x8000, 0x0001, 0x8001, 0x7F7F, 0xFF7F, 0x3F80, 0xBF80]),
        ),
        min_size=1,
        max_size=60,
    ),
    k=st.sampled_from([2, 5, 16, 64]),
)
def test_any_finite_bfloat16_row(data: list[int], k: int) -> None:
    bits = np.array([data], np.uint16)
    bits[(bits & 0x7F80) == 0x7F80] &= 0xBFFF  # NaN and infinity become finite
    check_row_promises(bits.view(BF16), k)


@settings(max_examples=100, deadline=None)
@given(
    row=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40),
    k=st.sampled_from([2, 7, 16]),
)
def test_any_finite_float32_row(row: list[float], k: int) -> None:
    check_row_promises(np.array([row], np.float32), k)


@pytest.mark.parametrize("weighted", [False, True])
def test_16_and_32_bit_ways_agree(weighted: bool) -> None:
    weight = rows_of("t3", 6, 700).astype(BF16)
    weight[:, ::7], weight[:, 3::11] = 0.0, -0.0
    h = np.random.default_rng(1).random(700) if weighted else None
    narrow = fit_codebooks(weight, 16, h)
    as_words = fit_codebooks(weight.astype(np.float32), 16, h)  # recognised as bfloat16 values
    # One row that is not bfloat16 sends the whole block the 32-bit way.
    mixed = np.vstack([weight.astype(np.float32), rows_of("gauss", 1, 700).astype(np.float32)])
    generic = fit_codebooks(mixed, 16, h)
    for a, b, c in zip(narrow, as_words, generic, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c[:-1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [4, 16, 256])
def test_sign_and_order_do_not_matter(dtype: Any, k: int) -> None:
    weight = rows_of("outlier", 6, 600).astype(dtype)
    codes, codebook = fit_codebooks(weight, k)
    mirrored_codes, mirrored = fit_codebooks(-weight, k)
    np.testing.assert_array_equal(mirrored, -codebook[:, ::-1])
    error = relative_error(weight, codes, codebook)[0]
    np.testing.assert_array_equal(relative_error(-weight, mirrored_codes, mirrored)[0], error)
    order = np.random.default_rng(0).permutation(600)
    shuffled_codes, shuffled = fit_codebooks(weight[::-1, order], k)
    np.testing.assert_array_equal(shuffled, codebook[::-1])
    np.testing.assert_array_equal(shuffled_codes, codes[::-1, order])


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_split_and_thread_count(dtype: Any) -> None:
    weight = rows_of("laplace", 24, 500).astype(dtype)
    h = np.random.default_rng(2).random(500)
    whole = fit_codebooks(weight, 16, h)
    errors = relative_error(weight, *whole)
    for threads in (1, 2, 8):
        starts = range(0, 24, 24 // threads)
        blocks = [weight[s : s + 24 // threads] for s in starts]
        with ThreadPoolExecutor(threads) as pool:
            parts = list(pool.map(lambda b: fit_codebooks(b, 16, h), blocks))
        for i in (0, 1):
            np.testing.assert_array_equal(np.concatenate([p[i] for p in parts]), whole[i])
        sse = np.concatenate([relative_error(b, *p)[0] for b, p in zip(blocks, parts, strict=True)])
        np.testing.assert_array_equal(sse, errors[0])


def test_strided_input_equals_contiguous() -> None:
    weight = rows_of("gauss", 8, 256).astype(BF16)
    for a, b in zip(
        fit_codebooks(weight[::2, ::2], 16), fit_codebooks(weight[::2, ::2].copy(), 16), strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_empty_rows_and_columns() -> None:
    for shape in ((0, 5), (3, 0)):
        codes, codebook = fit_codebooks(np.zeros(shape, np.float32), 16)
        assert codes.shape == shape
        assert codebook.shape == (shape[0], 16)
        assert not codebook.any()
        assert not needs_wide_codebook(np.zeros(shape, np.float32), 16)


@pytest.mark.parametrize(
    ("importance", "message"),
    [
        (np.ones(7), r"shape \(7,\).*8 inputs"),
        (np.array([1, 1, 1, np.nan, 1, 1, 1, 1]), "1 NaN or infinite"),
        (np.array([1, 1, 1, -2, 1, -1, 1, 1]), "2 negative"),
    ],
)
def test_bad_importance_is_refused(importance: np.ndarray, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        fit_codebooks(np.ones((2, 8), np.float32), 4, importance)


def test_zero_importance_means_uniform_and_the_floor_is_one_percent() -> None:
    weight = rows_of("gauss", 2, 400).astype(BF16)
    for a, b in zip(fit_codebooks(weight, 8, np.zeros(400)), fit_codebooks(weight, 8), strict=True):
        np.testing.assert_array_equal(a, b)
    h = np.random.default_rng(0).random(400) + 0.5
    h[5] = 0.0
    floored = h.copy()
    floored[5] = 0.01 * h.mean()
    for a, b in zip(fit_codebooks(weight, 8, h), fit_codebooks(weight, 8, floored), strict=True):
        np.testing.assert_array_equal(a, b)


def test_bad_options_are_refused() -> None:
    weight = np.ones((1, 4), np.float32)
    for size in (0, 1, 257):
        with pytest.raises(RecipeError, match=f"codebook_size is {size}"):
            fit_codebooks(weight, size)
    with pytest.raises(RecipeError, match="effort is 'extreme'"):
        fit_codebooks(weight, 16, effort="extreme")
    with pytest.raises(ValueError, match="float64"):
        fit_codebooks(weight.astype(np.float64), 16)
    with pytest.raises(ValueError, match="shape"):
        fit_codebooks(weight[0], 16)
    with pytest.raises(ValueError, match="wide=True"):
        fit_codebooks(np.full((1, 4), 1e6, np.float32), 16)


@pytest.mark.parametrize(
    ("row", "k", "wide"),
    [
        ([0.5, -0.25, 0.0], 4, False),
        ([65504.0, 1.0], 4, False),
        ([65536.0, 1.0], 4, True),  # overflow
        ([0.1, 0.2, 0.3], 4, True),  # few values, not exact in float16
        ([0.1, 0.2, 0.3], 2, False),  # more values than entries: no exactness to keep
        ([0.0, -0.0, 0.5], 2, False),  # the two zeros are one value
        ([2.0**-15, 2.0**-15 * 1.5, 0.0, -(2.0**-16)], 2, True),  # tiny
        ([2.0**-14, 2.0**-15 * 1.5, 0.0, -(2.0**-16)], 2, False),
        ([1.0, 1.0001, 1.0002, 1.0003], 2, True),  # entries closer than float16 can tell apart
        ([0.0, 1.0001, 1.0002, 1.0003], 2, False),
    ],
)
def test_wide_rule(row: list[float], k: int, wide: bool) -> None:
    weight = np.array([row], np.float32)
    ordinary = np.linspace(-1, 1, len(row), dtype=np.float16).astype(np.float32)[None]
    assert needs_wide_codebook(weight, k) is wide
    assert needs_wide_codebook(-weight, k) is wide
    assert needs_wide_codebook(np.vstack([ordinary, weight]), k) is wide


def test_offset_rows_stay_near_the_optimum_when_wide() -> None:
    weight = (1.0 + 1e-4 * rows_of("gauss", 3, 600) / 0.02).astype(np.float32)
    assert needs_wide_codebook(weight, 16)
    codes, codebook = fit_codebooks(weight, 16, wide=True)
    best = sum(optimal_codebook(row, 16)[1] for row in weight)
    assert relative_error(weight, codes, codebook)[0].sum() <= 1.003 * best


def test_cached_machine_code_follows_its_sources() -> None:
    """The row kernels compile these files in; numba's cache sees a change there only through this constant."""
    from trapetum.quantize import kmeans_rows

    folder = Path(trapetum.quantize.__path__[0])
    sources = b"".join((folder / f"{name}.py").read_bytes() for name in ("kmeans_search", "kmeans_stored"))
    assert hashlib.sha256(sources).hexdigest()[:16] == kmeans_rows._COMPILED_IN
