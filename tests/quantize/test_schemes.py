"""Schemes: announced bytes are stored bytes, specs survive JSON, blocks of rows give what the whole gives."""

from __future__ import annotations

import json
from math import prod

import ml_dtypes
import numpy as np
import pytest

from trapetum.errors import RecipeError
from trapetum.quantize.schemes import BITS, SCHEMES, Keep, KMeans, Scheme, scheme_from_bits, scheme_from_spec

ALL = [KMeans(4), KMeans(8, "fast"), KMeans(16), KMeans(64, "fast"), KMeans(256), KMeans(5), Keep()]


@pytest.mark.parametrize("scheme", ALL, ids=lambda s: s.label)
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_announced_arrays_are_what_is_made(scheme: Scheme, dtype: type) -> None:
    rng = np.random.default_rng(1)
    weight = (rng.standard_normal((5, 37)) * 0.1).astype(dtype)
    for wide in (False, True):
        made = scheme.quantize(weight, wide=wide)
        announced = scheme.arrays(weight.shape, weight.dtype, wide)
        assert {k: (a.dtype, a.shape) for k, a in made.to_arrays().items()} == announced
        assert made.nbytes == sum(prod(shape) * d.itemsize for d, shape in announced.values())
        assert made.layout == scheme.layout


@pytest.mark.parametrize("scheme", [s for s in ALL if s.row_independent], ids=lambda s: s.label)
def test_blocks_of_rows_give_what_the_whole_gives(scheme: Scheme) -> None:
    weight = np.random.default_rng(2).standard_normal((7, 50)).astype(np.float32)
    whole = scheme.quantize(weight).to_arrays()
    halves = [scheme.quantize(weight[a:b]).to_arrays() for a, b in ((0, 3), (3, 7))]
    for suffix, array in whole.items():
        assert np.array_equal(array, np.concatenate([h[suffix] for h in halves]))


@pytest.mark.parametrize("scheme", ALL, ids=lambda s: s.label)
def test_errors_by_row(scheme: Scheme) -> None:
    weight = np.random.default_rng(3).standard_normal((6, 90)).astype(ml_dtypes.bfloat16)
    made = scheme.quantize(weight)
    lost, squares = scheme.errors(weight, made)
    exact = weight.astype(np.float64)
    assert np.allclose(squares, (exact**2).sum(1), rtol=1e-12)
    assert np.allclose(lost, ((exact - made.dequantize()) ** 2).sum(1), rtol=1e-12, atol=1e-300)


@pytest.mark.parametrize("scheme", ALL, ids=lambda s: s.label)
def test_specs_survive_json(scheme: Scheme) -> None:
    assert scheme_from_spec(json.loads(json.dumps(scheme.spec()))) == scheme
    assert scheme.rate > 0


def test_bad_parameters_are_refused() -> None:
    with pytest.raises(RecipeError, match="codebook_size is 257"):
        KMeans(257)
    with pytest.raises(RecipeError, match="effort is 'x'; allowed: fast, default, high"):
        KMeans(16, "x")
    with pytest.raises(
        RecipeError, match=r"'later'; known: kmeans, .*ternary, gguf, asis, asis-ternary, .*asis-float8, keep"
    ):
        scheme_from_spec({"name": "later"})
    with pytest.raises(RecipeError, match="does not take"):
        scheme_from_spec({"name": "keep", "codebook_size": 3})
    with pytest.raises(RecipeError, match=r"schemes with a bit width: (additive, )?kmeans"):
        scheme_from_bits("keep", 4)


def test_every_width_belongs_to_a_scheme() -> None:
    assert BITS.keys() <= SCHEMES.keys()
    assert all(scheme_from_bits(name, b).label for name, widths in BITS.items() for b in widths)
