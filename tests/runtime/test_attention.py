"""Attention, rotary embedding and cache against plain float64 loops."""

from __future__ import annotations

import numpy as np
import pytest

from trapetum.kernels.cpu.pool import Pool
from trapetum.models.rope import Rope
from trapetum.runtime.attention import KeyValues, attend, rotary_tables, rotate


def naive(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    window: int | None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """One position and one head at a time, float64."""
    batch, new, heads, dim = q.shape
    group, past = heads // k.shape[1], k.shape[2] - new
    out = np.zeros(q.shape)
    for b, t, h in np.ndindex(batch, new, heads):
        first = 0 if window is None else max(0, past + t - window + 1)
        keys = k[b, h // group, first : past + t + 1].astype(np.float64)
        scores = keys @ q[b, t, h].astype(np.float64) * (dim**-0.5 if scale is None else scale)
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        top = scores.max() if sinks is None else max(scores.max(), sinks[h])
        p = np.exp(scores - top)
        extra = 0.0 if sinks is None else np.exp(float(sinks[h]) - top)
        out[b, t, h] = (p / (p.sum() + extra)) @ v[b, h // group, first : past + t + 1]
    return out


@pytest.mark.parametrize("window", [None, 1, 5, 200])
@pytest.mark.parametrize(("new", "past"), [(1, 0), (1, 300), (7, 3), (150, 0), (140, 141)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3), (4, 1)])
def test_equal_to_loops(new: int, past: int, heads: int, kv_heads: int, window: int | None) -> None:
    rng = np.random.default_rng(new + past)
    q = rng.standard_normal((2, new, heads, 16)).astype(np.float32)
    k, v = (rng.standard_normal((2, kv_heads, past + new, 16)).astype(np.float32) for _ in range(2))
    ours = attend(q, k, v, window, Pool(2))
    np.testing.assert_allclose(ours, naive(q, k, v, window), rtol=0, atol=3e-6)
    np.testing.assert_array_equal(ours, attend(q, k, v, window, Pool(1)))


@pytest.mark.parametrize("scale", [None, 0.4])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("sinks", [None, -3.0, 2.0, 50.0])
@pytest.mark.parametrize(("new", "past", "window"), [(1, 30, None), (1, 30, 4), (140, 3, 9)])
def test_options_equal_to_loops(
    scale: float | None, softcap: float | None, sinks: float | None, new: int, past: int, window: int | None
) -> None:
    rng = np.random.default_rng(new)
    q = rng.standard_normal((2, new, 4, 16)).astype(np.float32)
    k, v = (rng.standard_normal((2, 2, past + new, 16)).astype(np.float32) for _ in range(2))
    sink = None if sinks is None else (sinks + rng.standard_normal(4)).astype(np.float32)
    ours = attend(q, k, v, window, Pool(2), scale=scale, softcap=softcap, sinks=sink)
    expected = naive(q, k, v, window, scale, softcap, sink)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=3e-6)
    assert np.abs(expected - naive(q, k, v, window)).max() > 1e-3 or (scale, softcap, sinks) == (None,) * 3


def test_huge_scores_do_not_overflow() -> None:
    q = np.full((1, 3, 1, 4), 1e4, np.float32)
    k, v = np.full((1, 1, 3, 4), 1e4, np.float32), np.arange(12, dtype=np.float32).reshape(1, 1, 3, 4)
    np.testing.assert_allclose(attend(q, k, v, None, Pool(1))[0, :, 0, 0], [0, 2, 4])


def test_rotation_by_complex_numbers() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 5, 3, 8)).astype(np.float32)
    inv = Rope().inverse_frequencies(8)
    turned = x.copy()
    rotate(turned, *rotary_tables(inv, 10, 15))
    z = x[..., :4].astype(np.complex128) + 1j * x[..., 4:]
    z *= np.exp(1j * np.arange(10, 15)[:, None, None] * inv.astype(np.float64))
    np.testing.assert_allclose(turned, np.concatenate([z.real, z.imag], axis=-1), atol=3e-6)


def test_only_the_first_values_of_a_head_are_rotated() -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((1, 4, 2, 12)).astype(np.float32)
    tables = rotary_tables(Rope().inverse_frequencies(8), 3, 7, 1.25)
    turned, part = x.copy(), np.ascontiguousarray(x[..., :8])
    rotate(turned, *tables)
    rotate(part, *tables)
    np.testing.assert_array_equal(turned[..., :8], part)
    np.testing.assert_array_equal(turned[..., 8:], x[..., 8:])
    lengths = np.linalg.norm(part, axis=-1) / np.linalg.norm(x[..., :8], axis=-1)
    np.testing.assert_allclose(lengths, 1.25, rtol=1e-6)  # the magnitude multiplies both tables


def test_keys_and_values_grow_without_losing_anything() -> None:
    rng = np.random.default_rng(1)
    state, length = KeyValues(1, 3, 4, capacity=1), 0
    seen: list[np.ndarray] = []
    for size in (1, 1, 5, 2):
        k = rng.standard_normal((1, size, 3, 4)).astype(np.float32)
        seen.append(k)
        keys, values = state.append(length, k, -k)
        np.testing.assert_array_equal(keys, np.concatenate(seen, axis=1).transpose(0, 2, 1, 3))
        np.testing.assert_array_equal(values, -keys)
        length += size


def test_float16_keys_and_values_are_the_rounded_ones() -> None:
    rng = np.random.default_rng(2)
    k, v = (rng.standard_normal((2, 70, 2, 16)).astype(np.float32) for _ in range(2))
    k[0, 3, 1, 5], v[1, 2, 0, 0] = 1e6, -np.inf  # cut to what float16 holds
    state = KeyValues(2, 2, 16, 8, "f16")
    state.append(0, k[:, :9], v[:, :9])
    keys, values = state.append(9, k[:, 9:], v[:, 9:])
    assert keys.dtype == values.dtype == np.float16
    for kept, given in ((keys, k), (values, v)):
        rounded = np.clip(given, -65504, 65504).astype(np.float16).transpose(0, 2, 1, 3)
        np.testing.assert_array_equal(kept, rounded)
    q = rng.standard_normal((2, 4, 4, 16)).astype(np.float32)
    ours = attend(q, keys, values, None, Pool(2))
    wide = attend(q, keys.astype(np.float32), values.astype(np.float32), None, Pool(1))
    np.testing.assert_array_equal(ours, wide)
