"""The rotation against scipy's Hadamard matrix and the worked example of the folding rule."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scipy.linalg import hadamard

from trapetum.rotation import HadamardRotation


@pytest.mark.parametrize("widths", [(1024, 2048), (1536, 512), (768,), (128, 384)])
def test_fold_is_the_matrix_product(widths: tuple[int, ...]) -> None:
    rotation = HadamardRotation.for_widths(widths, seed=3)
    block = rotation.block_size
    matrix = hadamard(block) / np.sqrt(block)
    for width in widths:
        w = np.random.default_rng(width).normal(size=(5, width))
        signed = (w * rotation.signs[width]).reshape(5, -1, block)
        expected = (signed @ matrix).reshape(5, width)
        assert np.allclose(rotation.fold(w), expected, atol=1e-6)


def test_block_is_the_largest_that_divides_every_width() -> None:
    assert HadamardRotation.for_widths([4096, 11264]).block_size == 1024
    assert HadamardRotation.for_widths([4096, 1536]).block_size == 512
    assert HadamardRotation.for_widths([640]).block_size == 128
    with pytest.raises(ValueError, match="576"):
        HadamardRotation.for_widths([576])


def test_unfold_undoes_fold_exactly_for_bf16_weights() -> None:
    rotation = HadamardRotation.for_widths([2048])
    w = np.random.default_rng(0).normal(size=(7, 2048)).astype(np.float32)
    w = (w.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    folded = rotation._apply(w, before=True)
    assert np.abs(rotation.unfold(folded) - w).max() <= 1e-6
    assert np.abs(np.linalg.norm(folded, axis=1) / np.linalg.norm(w, axis=1) - 1).max() < 1e-6


def test_a_folded_layer_on_a_folded_input_is_the_layer() -> None:
    rotation = HadamardRotation.for_widths([512], seed=9)
    rng = np.random.default_rng(1)
    w, x = rng.normal(size=(16, 512)), rng.normal(size=(3, 512))
    assert np.allclose(rotation.fold(x) @ rotation.fold(w).T, x @ w.T, atol=1e-4)


def test_signs_are_a_function_of_seed_and_width() -> None:
    a, b = HadamardRotation.for_widths([256, 512], 1), HadamardRotation.for_widths([512], 1)
    assert np.array_equal(a.signs[512], b.signs[512])
    assert not np.array_equal(a.signs[512], HadamardRotation.for_widths([512], 2).signs[512])
    assert 200 < (a.signs[512] > 0).sum() < 312


def test_json_round_trip_and_faults() -> None:
    rotation = HadamardRotation.for_widths([384, 640])
    value = json.loads(json.dumps(rotation.to_json()))
    again = HadamardRotation.from_json(value)
    assert again.block_size == rotation.block_size
    assert all(np.array_equal(again.signs[w], rotation.signs[w]) for w in (384, 640))
    for change, word in (
        ({"transform": "dct"}, "transform"),
        ({"block_size": 96}, "power of two"),
        ({"block_size": 256}, "multiple"),
        ({"signs": {"384": "00"}}, "sign bits"),
    ):
        with pytest.raises(ValueError, match=word):
            HadamardRotation.from_json({**value, **change})


def test_what_leaves_float32_is_infinite_without_a_warning() -> None:
    turned = HadamardRotation(128, {128: np.ones(128, np.int8)}).fold(np.full((1, 128), 1e38, np.float32))
    assert np.isinf(turned[0, 0])
    assert not turned[0, 1:].any()
