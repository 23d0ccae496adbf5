"""Rotation keys of GGUF files: a writer and a strict reader of the same table."""

from __future__ import annotations

import numpy as np
import pytest

from trapetum.errors import FormatError, UnsupportedModelError
from trapetum.formats.gguf_rotation import read_rotation, rotation_pairs
from trapetum.rotation import HadamardRotation

ROTATION = HadamardRotation.for_widths([256, 512], seed=3)
NAMES = ("token_embd.weight", "blk.0.attn_q.weight", "blk.0.ffn_down.weight")
SHAPES = {
    "token_embd.weight": (300, 256),
    "blk.0.attn_q.weight": (256, 256),
    "blk.0.ffn_down.weight": (256, 512),
}


def stated(names=NAMES, *, tied=True, **changes):
    values = {k: entry.value for k, entry in rotation_pairs(ROTATION, names, tied=tied).items()}
    for key, value in changes.items():
        values[f"prism.hadamard.{key}"] = value
    return {k: v for k, v in values.items() if v is not None}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("names", [NAMES, NAMES[1:]])
def test_round_trip(tied, names, tmp_path):
    values = stated(names, tied=tied)
    assert values["prism.hadamard.version"] == (2 if tied and names is NAMES else 1)
    assert ("prism.hadamard.inverse_weight_names" in values) == (names is NAMES)
    found = read_rotation(tmp_path, values, SHAPES)
    assert found.names == set(names)
    assert found.rotation.block_size == ROTATION.block_size
    for width, signs in ROTATION.signs.items():
        assert np.array_equal(found.rotation.signs[width], signs)


def test_no_rotation(tmp_path):
    assert read_rotation(tmp_path, {"general.name": "x"}, SHAPES) is None


def test_identity_means_positive_signs(tmp_path):
    found = read_rotation(tmp_path, stated(sign_mode="identity", sign_widths=None, sign_values=None), SHAPES)
    assert {w: set(s.tolist()) for w, s in found.rotation.signs.items()} == {256: {1}, 512: {1}}


@pytest.mark.parametrize(
    "change",
    [
        {"version": 3},
        {"version": None},
        {"transform": "normalized-signed-sylvester-walsh-hadamard"},
        {"axis": "output"},
        {"sign_mode": "random"},
        {"gdn_v_grouped": True},
    ],
)
def test_another_contract_is_refused(change, tmp_path):
    with pytest.raises(UnsupportedModelError, match=r"prism\.hadamard"):
        read_rotation(tmp_path, stated(**change), SHAPES)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 1},
        {"tied_output": None},
        {"weight_names": []},
        {"weight_names": ["blk.7.attn_q.weight"]},
        {"weight_names": list(NAMES)},
        {"inverse_weight_names": ["output.weight"]},
        {"block_size": 96},
        {"block_size": None},
        {"sign_widths": [256]},
        {"sign_widths": [256, 256, 256]},
        {"sign_values": np.full(768, 2, np.int32)},
        {"sign_values": None},
        {"sign_widths": [768]},
    ],
)
def test_keys_that_contradict_each_other_are_refused(change, tmp_path):
    with pytest.raises(FormatError, match=r"prism\.hadamard"):
        read_rotation(tmp_path, stated(**change), SHAPES)


def test_a_head_beside_a_tied_one(tmp_path):
    with pytest.raises(FormatError, match="head"):
        read_rotation(tmp_path, stated(), {**SHAPES, "output.weight": (300, 256)})
