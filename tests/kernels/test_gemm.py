"""Products of many tokens: every edge of the blocking against float64, and nothing written beyond."""

from __future__ import annotations

import numpy as np
import pytest

from trapetum.kernels.cpu.gemm import ROWS, TOKENS, multiply_panels, pack_panels


@pytest.mark.parametrize(
    ("tokens", "rows", "count"), [(1, 1, 1), (31, 13, 7), (33, 24, 300), (128, 50, 1024)]
)
def test_products(tokens: int, rows: int, count: int) -> None:
    rng = np.random.default_rng(tokens)
    x = rng.standard_normal((tokens, count)).astype(np.float32)
    w = rng.standard_normal((rows, count)).astype(np.float32)
    panels = np.full((-(-tokens // TOKENS), count, TOKENS), np.nan, np.float32)
    for t in range(len(panels)):
        pack_panels(x, panels, t, t + 1)
    out = np.full((tokens, rows + 5), np.nan, np.float32)
    multiply_panels(w, panels, out, 2, 0, len(panels))
    exact = x.astype(np.float64) @ w.astype(np.float64).T
    assert np.linalg.norm(out[:, 2 : 2 + rows] - exact) <= 5e-7 * np.linalg.norm(exact)
    assert np.isnan(out[:, :2]).all()
    assert np.isnan(out[:, 2 + rows :]).all()


def test_tiles_and_blocks_of_tokens_change_no_bit() -> None:
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal((n, 600)).astype(np.float32) for n in (3 * TOKENS - 5, 3 * ROWS + 1))
    panels = np.empty((3, 600, TOKENS), np.float32)
    pack_panels(x, panels, 0, 3)
    whole, parts = (np.empty((len(x), len(w)), np.float32) for _ in range(2))
    multiply_panels(w, panels, whole, 0, 0, 3)
    for first in range(0, len(w), 5):
        for t in range(3):
            multiply_panels(w[first : first + 5], panels, parts, first, t, t + 1)
    np.testing.assert_array_equal(whole, parts)


def test_what_is_not_finite_stays_with_its_token_and_row() -> None:
    x, w = np.ones((TOKENS + 1, 20), np.float32), np.ones((ROWS + 1, 20), np.float32)
    x[3, 5], w[ROWS, 7] = np.nan, np.inf
    panels = np.empty((2, 20, TOKENS), np.float32)
    pack_panels(x, panels, 0, 2)
    out = np.empty((len(x), len(w)), np.float32)
    multiply_panels(w, panels, out, 0, 0, 2)
    expected = np.full(out.shape, 20, np.float32)
    expected[:, ROWS], expected[3] = np.inf, np.nan
    np.testing.assert_array_equal(out, expected)
