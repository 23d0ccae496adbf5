"""Degenerate numbers, through the whole job: refused by name, or kept exactly (section C of the fault catalogue)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import trapetum
from trapetum.errors import CheckpointError

GATE = "model.layers.1.mlp.gate_proj.weight"  # 96 x 64
QUERY = "model.layers.0.self_attn.q_proj.weight"  # 64 x 64
NORM = "model.norm.weight"
BF16 = ml_dtypes.bfloat16
Change = Callable[[NDArray[Any]], Any]


def _nan(w: NDArray[Any]) -> None:
    w[7, 9] = np.nan


def _inf(w: NDArray[Any]) -> None:
    w[7, 9] = np.inf


def _rows_of_nan(w: NDArray[Any]) -> None:
    w[3:6] = np.nan


def _zero_rows(w: NDArray[Any]) -> None:
    w[:4] = 0


def _zero_matrix(w: NDArray[Any]) -> None:
    w[:] = 0


def _negative_zeros(w: NDArray[Any]) -> None:
    w[:2] = -0.0


def _zero_columns(w: NDArray[Any]) -> None:
    w[:, :32] = 0


def _below_float16(w: NDArray[Any]) -> None:
    w[1] = np.where(np.arange(64) % 2, 1e-9, -1e-9)
    w[2] = 3e-12


def _subnormal_in_bfloat16(w: NDArray[Any]) -> None:
    w[1] = np.where(np.arange(64) % 2, 2.0**-133, -(2.0**-127))


def _beyond_float16(w: NDArray[Any]) -> None:
    w[1] = np.where(np.arange(64) % 2, 3.3895314e38, -1e5)


def _one_to_three_values(w: NDArray[Any]) -> None:
    for row, count in enumerate((1, 2, 3)):
        w[row] = np.array([0.25, -0.5, 0.75])[np.arange(64) % count]


@pytest.mark.parametrize(
    ("change", "said"), [(_nan, "1 NaN"), (_inf, "1 infinite"), (_rows_of_nan, "192 NaN")]
)
def test_what_is_not_finite_is_refused(change: Change, said: str, model: Any, tmp_path: Path) -> None:
    arrays = model.tensors()
    change(arrays[GATE])
    model.write(arrays)
    with pytest.raises(CheckpointError) as caught:
        trapetum.quantize_model(model.folder, tmp_path / "out")
    for word in ("model.safetensors", GATE, said, "[3, 0]" if change is _rows_of_nan else "[7, 9]"):
        assert word in caught.value.message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize(
    "change",
    [
        _zero_rows,
        _zero_matrix,
        _negative_zeros,
        _zero_columns,
        _below_float16,
        _subnormal_in_bfloat16,
        _beyond_float16,
        _one_to_three_values,
    ],
)
def test_few_values_are_kept_exactly(change: Change, bits: int, model: Any, tmp_path: Path) -> None:
    """Every row has at most 8 values plus zero, so that 16 entries (8 where the change leaves no more) lose nothing."""
    arrays = model.tensors()
    change(arrays[GATE])
    model.write(arrays)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = trapetum.quantize_model(model.folder, tmp_path / "out", bits=bits)
    with trapetum.open_artifact(tmp_path / "out") as artifact:
        got = artifact[GATE].dequantize()
    exact = arrays[GATE].astype(np.float32)
    if change is _zero_columns and bits == 3:  # 9 values a row
        assert 0 < report.errors[GATE] < 1e-2
        assert np.isfinite(got).all()
    else:
        assert np.array_equal(got, exact)
        assert report.errors[GATE] == 0


def test_kept_bits_pass_through(model: Any, tmp_path: Path) -> None:
    arrays = model.tensors()
    bits = np.resize(np.array([1, 64, 0x8000, 0x7F7F, 0x3F81], np.uint16), 64)
    arrays[NORM] = bits.view(BF16)
    model.write(arrays)
    trapetum.quantize_model(model.folder, tmp_path / "out")
    with trapetum.open_artifact(tmp_path / "out") as artifact:
        assert np.array_equal(artifact[NORM].dequantize().view(np.uint32), bits.astype(np.uint32) << 16)


def test_sign_and_order_of_rows_do_not_matter(model: Any, new_model: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    arrays = {n: rng.normal(0, 0.1, a.shape).astype(BF16) for n, a in model.tensors().items()}
    order = rng.permutation(96)
    variants = {
        "plain": arrays,
        "negative": {n: -a for n, a in arrays.items()},
        "exchanged": arrays | {GATE: arrays[GATE][order]},
    }
    found = {}
    for name, content in variants.items():
        made = new_model(tmp_path / name)
        made.write_config()
        made.write(content)
        trapetum.quantize_model(made.folder, tmp_path / f"{name}-out")
        with trapetum.open_artifact(tmp_path / f"{name}-out") as artifact:
            found[name] = artifact[GATE].dequantize()
    assert np.array_equal(found["exchanged"], found["plain"][order])
    squares = [
        np.square(found[n] - variants[n][GATE].astype(np.float64)).sum(axis=1) for n in ("plain", "negative")
    ]
    assert squares[0].sum() == pytest.approx(squares[1].sum(), rel=1e-6)
