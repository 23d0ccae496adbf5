"""Exact ternary and four-level scales against plain enumeration, and the published Gaussian errors."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trapetum.quantize import kmeans_stored, ternary_search
from trapetum.quantize.ternary_search import fit_groups
from trapetum.tensors import TernaryTensor

SAMPLES = {
    "gauss": lambda rng, shape: rng.normal(size=shape),
    "laplace": lambda rng, shape: rng.laplace(size=shape),
    "t3": lambda rng, shape: rng.standard_t(3, shape),
    "few": lambda rng, shape: rng.choice([-1.0, 0.0, 0.25, 1.0], shape),
    "bf16 grid": lambda rng, shape: np.round(rng.normal(size=shape) * 64) / 64,
}


def decoded(codes, scales) -> np.ndarray:
    group = codes.shape[1] // scales.shape[1]
    return (codes.astype(np.float64) - 1) * np.repeat(scales.astype(np.float64), group, axis=1)


def enumerated_gain(x: np.ndarray, w: np.ndarray, levels: int) -> float:
    """Largest N^2 / M over every assignment that some d gives, by trying a d between all breakpoints."""
    best = 0.0
    for y in (x, -x) if levels == 4 else (x,):
        breaks = 2 * np.abs(y)
        if levels == 4:
            breaks = np.concatenate([breaks, y[y > 0] / 1.5])
        breaks = np.unique(breaks[breaks > 0])
        between = np.concatenate([(breaks[1:] + breaks[:-1]) / 2, [breaks[0] / 2]])
        codes = np.clip(np.rint(y[None, :] / between[:, None]), -1, 2 if levels == 4 else 1)
        n, m = (w * y * codes).sum(1), (w * codes * codes).sum(1)
        keep = m > 0
        best = max(best, float((n[keep] ** 2 / m[keep]).max()))
    return best


@pytest.mark.parametrize("levels", [3, 4])
@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize("sample", sorted(SAMPLES))
@pytest.mark.parametrize("weighted", [False, True])
def test_no_assignment_is_better(sample: str, group: int, levels: int, weighted: bool) -> None:
    rng = np.random.default_rng([levels, group, weighted])
    x = SAMPLES[sample](rng, (12, 2 * group)).astype(np.float32)
    w = rng.lognormal(size=2 * group) if weighted else np.ones(2 * group)
    codes, scales = fit_groups(x, group, levels, w if weighted else None)
    error = (w * (x - decoded(codes, scales)) ** 2).reshape(12, 2, group).sum(2)
    for r in range(12):
        for g in range(2):
            part = slice(g * group, (g + 1) * group)
            values = x[r, part].astype(np.float64)
            energy = float((w[part] * values**2).sum())
            optimum = energy - enumerated_gain(values, w[part], levels)
            # float16 moves d by at most 2**-11 of itself: at most 2**-22 of the energy on top of the optimum
            assert error[r, g] <= optimum + 2.0**-21 * energy
            assert error[r, g] >= optimum - 1e-9 * energy


@pytest.mark.parametrize(
    ("levels", "group", "limit"), [(3, 128, 0.188), (3, 64, 0.185), (4, 128, 0.1325), (4, 64, 0.124)]
)
def test_gaussian_error(levels: int, group: int, limit: float) -> None:
    x = np.random.default_rng(1).normal(size=(512, 2048)).astype(np.float32)
    codes, scales = fit_groups(x, group, levels)
    assert ((x - decoded(codes, scales)) ** 2).sum() / (x.astype(np.float64) ** 2).sum() <= limit


@pytest.mark.parametrize("levels", [3, 4])
def test_ternary_groups_come_back_exactly(levels: int) -> None:
    rng = np.random.default_rng(2)
    d = np.float16(rng.uniform(1e-4, 3, (8, 4, 1))).astype(np.float32)
    x = (rng.integers(-1, 2, (8, 4, 128)) * d).reshape(8, 512).astype(np.float32)
    codes, scales = fit_groups(x, 128, levels)
    assert np.array_equal(decoded(codes, scales), x)


def test_four_levels_use_either_sign() -> None:
    x = np.tile(np.array([[-1, 0, 1, 2]], np.float32), (1, 32))
    for sign in (1, -1):
        codes, scales = fit_groups(sign * x, 128, 4)
        assert np.array_equal(decoded(codes, scales), sign * x)
        assert np.sign(scales).tolist() == [[sign]]


@pytest.mark.parametrize("levels", [3, 4])
def test_degenerate_groups(levels: int) -> None:
    x = np.zeros((4, 128), np.float32)
    x[1] = -0.0
    x[2] = 3e-12
    x[3] = 3.3e38
    codes, scales = fit_groups(x, 128, levels)
    assert np.array_equal(codes[:3], np.ones((3, 128), np.uint8))
    assert scales[:3].tolist() == [[0], [0], [0]]
    assert np.isfinite(scales).all()


def test_zero_importance_of_a_group_means_uniform() -> None:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(2, 256)).astype(np.float32)
    w = np.ones(256)
    w[:128] = 0
    assert all(np.array_equal(a, b) for a, b in zip(fit_groups(x, 128, 3, w), fit_groups(x, 128, 3)))


@given(st.integers(0, 2**32 - 1), st.sampled_from([3, 4]))
def test_mirrored_weights_have_the_same_error(seed: int, levels: int) -> None:
    x = np.random.default_rng(seed).laplace(size=(1, 64)).astype(np.float32)
    errors = [((y - decoded(*fit_groups(y, 64, levels))) ** 2).sum() for y in (x, -x)]
    assert errors[0] == pytest.approx(errors[1], rel=1e-12)


def test_rows_that_are_not_whole_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="not whole groups of 128"):
        fit_groups(np.zeros((1, 192), np.float32), 128, 3)


def test_tensor_bytes_are_the_bytes_of_a_gguf_block() -> None:
    """The golden trits of the PQ2_0 block: d = 1.5, trit(j) = floor((j*j + 3j + 7) / 5) mod 3 - 1."""
    trits = np.array([(j * j + 3 * j + 7) // 5 % 3 for j in range(128)], np.uint8)
    arrays = TernaryTensor(trits[None], np.array([[1.5]], np.float16)).to_arrays()
    golden = "8901895562406295189058250624568901895562406295189058250624568901"
    assert arrays["codes"].tobytes().hex() == golden
    assert arrays["scales"].tobytes().hex() == "003e"
    again = TernaryTensor.from_arrays(arrays, (1, 128), {"levels": 3, "group_size": 128, "rotation": None})
    assert np.array_equal(again.dequantize(), (trits[None].astype(np.float32) - 1) * 1.5)


def test_code_three_needs_four_levels() -> None:
    with pytest.raises(ValueError, match="3 levels"):
        TernaryTensor(np.full((1, 4), 3, np.uint8), np.ones((1, 1), np.float16))


def test_the_compiled_cache_follows_the_rounding() -> None:
    """numba's cache does not see a change in another file; the constant is one in this file."""
    source = Path(kmeans_stored.__file__).read_bytes()
    assert hashlib.sha256(source).hexdigest()[:16] == ternary_search._COMPILED_IN
