"""Lossless intake of weights that are ternary already: detection, refusal, proof."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import trapetum
from trapetum.errors import CheckpointError, UnsupportedModelError
from trapetum.formats.artifact import Artifact
from trapetum.formats.checkpoint import Checkpoint
from trapetum.progress import Progress
from trapetum.quantize.job import quantize_model
from trapetum.quantize.plan import make_plan
from trapetum.quantize.recipe import resolve_recipe
from trapetum.quantize.schemes import Keep
from trapetum.quantize.survey import survey
from trapetum.quantize.ternary_intake import Recognition, TernaryAsIs, recognise

WIDE = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "head_dim": 64}
Q = "model.layers.0.self_attn.q_proj.weight"


def unpacked(rng: np.random.Generator, rows: int, columns: int, group: int = 128) -> np.ndarray:
    """What a QAT author uploads: {-s, 0, +s} with one bfloat16 s a group; some groups are all zero."""
    group = min(group, columns)
    scales = (rng.random((rows, columns // group)) * 0.1 + 0.01).astype(ml_dtypes.bfloat16).astype(np.float32)
    scales[0, 0] = 0.0
    trits = rng.integers(-1, 2, (rows, columns // group, group))
    return (trits * scales[:, :, None]).reshape(rows, columns)


class Lines(Progress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def advance(self, count: int, line: str | None = None) -> None:
        if line:
            self.lines.append(line)


@pytest.mark.parametrize(
    "dtype", [ml_dtypes.bfloat16, np.float16, np.float32], ids=lambda d: np.dtype(d).name
)
def test_unpacked_checkpoints_come_over_exactly(
    dtype: type, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    plain = np.random.default_rng(5).standard_normal((80, 256)).astype(dtype)
    folder = make_model(fill=unpacked, dtype=dtype, change={"lm_head.weight": plain}, **WIDE)
    log = Lines()
    report = quantize_model(folder, tmp_path / "out", scheme="asis", progress=log)
    assert {r.name for r in report.rows if isinstance(r.scheme, Keep) and len(r.shape) == 2} == {
        "lm_head.weight"
    }
    assert any(
        "1 of 16 tensors are not ternary and kept as they are: lm_head.weight" in n for n in report.notes
    )
    with Artifact.open(tmp_path / "out") as art, Checkpoint.open(folder) as source:
        for name in source.names():
            np.testing.assert_array_equal(art[name].dequantize(), source.load(name).dequantize(), strict=True)
        entry = art.manifest["tensors"][Q]
        assert art[Q].to_arrays()["scales"].dtype == np.float16
        assert entry["relative_error"] == 0
        assert entry["scheme"] == {"name": "asis-ternary", "group_size": 128, "levels": 3}
        proof = entry["proof"]
        groups = np.asarray(source.load(Q).dequantize()).reshape(-1, 128)
        zero = int((groups == 0).all(axis=1).sum())
        assert zero > 0
        assert proof == {
            "groups": 512, "single_magnitude_groups": 512 - zero, "zero_groups": zero, "code_3": 0,
            "scales_exact_in_float16": 512, "max_difference": 0.0,
        }  # fmt: skip
        arrays = art[Q].to_arrays()
        assert entry["sha256"] == sha256(arrays["codes"].tobytes() + arrays["scales"].tobytes()).hexdigest()
    (line,) = [text for text in log.lines if text.startswith(Q)]
    assert "512 groups checked" in line
    assert "0 codes 3, largest difference 0, all scales exact in float16, sha256" in line
    again = quantize_model(folder, tmp_path / "four", bits=1.58)
    assert max(again.errors[n] for n in (Q, Q.replace("q_proj", "o_proj"))) == 0  # the exact search agrees


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (lambda rng: np.where(rng.random((4, 192)) < 0.5, 0.25, -0.25), {192: 3, 64: 3}),
        (lambda rng: unpacked(rng, 4, 256, 256), {256: 3, 128: 3, 64: 3}),  # TriLM: one scale for 256
        (lambda rng: unpacked(rng, 4, 256, 128), {128: 3, 64: 3}),
        (lambda rng: unpacked(rng, 4, 192, 64), {64: 3}),
        (lambda rng: unpacked(rng, 4, 256, 32), {}),
        (lambda rng: np.r_["-1", [[0.5, 1.0, -0.5] * 42 + [0.0, 1.0]]], {128: 4, 64: 4}),
        (lambda rng: -np.r_["-1", [[0.5, 1.0, -0.5] * 42 + [0.0, 1.0]]], {128: 4, 64: 4}),
        (lambda rng: np.r_["-1", [[0.5, 1.0, -1.0] * 42 + [0.0, 1.0]]], {}),
        (lambda rng: np.full((2, 128), -0.0), {128: 3, 64: 3}),
        (lambda rng: np.nextafter(np.float32(0.5), 1) * np.r_["-1", [[1.0] * 64 + [0.0] * 64]], {128: 3, 64: 3}),
        (lambda rng: np.r_["-1", [[0.5] * 127, ], [[np.nextafter(np.float32(0.5), 0)]]], {}),
    ],
)  # fmt: skip
def test_what_counts_as_ternary(
    make: Callable[[np.random.Generator], np.ndarray], found: dict[int, int]
) -> None:
    weight = np.ascontiguousarray(make(np.random.default_rng(1)), dtype=np.float32)
    groups = recognise(weight).groups
    assert {g: levels for g, (levels, _) in groups.items()} == found
    for group, (levels, wide) in groups.items():
        tensor = TernaryAsIs(group, levels).quantize(weight, wide=wide)
        np.testing.assert_array_equal(tensor.dequantize(), weight)


def test_scales_beyond_float16_stay_float32() -> None:
    tiny = np.float32(2.0**-20 * 1.00390625)  # a bfloat16 below the grid of float16
    weight = np.r_["-1", [[tiny, -tiny, 0, tiny] * 32]].astype(np.float32)
    (levels, wide) = recognise(weight).groups[128]
    assert (levels, wide) == (3, True)
    tensor = TernaryAsIs(128).quantize(weight, wide=True)
    assert tensor.scales.dtype == np.float32
    np.testing.assert_array_equal(tensor.dequantize(), weight)
    assert TernaryAsIs(128).proof(weight, tensor)["scales_exact_in_float16"] == 0
    rounded = TernaryAsIs(128).quantize(weight, wide=False)
    with pytest.raises(ValueError, match="differ from the weights"):
        TernaryAsIs(128).proof(weight, rounded)


def test_one_bad_block_spoils_a_grouping() -> None:
    total = Recognition()
    total.add(recognise(np.full((2, 256), 0.5, np.float32)))
    assert set(total.groups) == {256, 128, 64}
    total.add(recognise(unpacked(np.random.default_rng(0), 8, 256, 128).astype(np.float32)))
    assert set(total.groups) == {128, 64}
    total.add(recognise(np.random.default_rng(0).standard_normal((1, 256)).astype(np.float32)))
    assert total.settle((11, 256), 11 * 512) is None


def test_rows_too_short_to_save_anything_are_kept() -> None:
    assert recognise(np.ones((64, 1), np.float32)).settle((64, 1), 128) is None


def test_a_model_that_is_not_ternary_is_refused(make_model: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="none of 16 tensors is, such as"):
        quantize_model(make_model(), tmp_path / "out", scheme="asis")
    assert not (tmp_path / "out").exists()


def test_nan_is_named_before_anything_is_taken_for_ternary(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    bad = unpacked(np.random.default_rng(0), 256, 256).astype(ml_dtypes.bfloat16)
    bad[7, 3] = np.nan
    with pytest.raises(CheckpointError, match=f"{Q} holds 1 NaN"):
        quantize_model(make_model(fill=unpacked, change={Q: bad}, **WIDE), tmp_path / "out", scheme="asis")


def test_settled_schemes_survive_a_stopped_job(
    make_model: Callable[..., Path], tmp_path: Path, identity: Callable[[Path], dict[str, bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    folder = make_model(fill=unpacked, **WIDE)
    quantize_model(folder, tmp_path / "whole", scheme="asis")

    def stop(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("trapetum.quantize.job.assemble", stop)
        with pytest.raises(KeyboardInterrupt):
            quantize_model(folder, tmp_path / "out", scheme="asis")
    state = json.loads((tmp_path / "out" / ".trapetum" / "job.json").read_bytes())
    assert state["schemes"][Q]["name"] == "asis-ternary"
    report = quantize_model(folder, tmp_path / "out", scheme="asis")
    assert report.resumed == len(report.rows)
    assert identity(tmp_path / "out") == identity(tmp_path / "whole")


def test_block_borders_do_not_matter(make_model: Callable[..., Path]) -> None:
    with Checkpoint.open(make_model(fill=unpacked, **WIDE)) as source:
        plan = make_plan(source, resolve_recipe(scheme="asis"))
        whole = survey(plan, plan.budget(1))
        small = survey(plan, replace(plan.budget(2), block_weights=700))
    assert [r.scheme for r in whole.rows] == [r.scheme for r in small.rows]


def test_our_own_four_level_export_comes_back(make_model: Callable[..., Path], tmp_path: Path) -> None:
    quantize_model(make_model(**WIDE), tmp_path / "four", scheme="ternary", levels=4)
    trapetum.export_artifact(tmp_path / "four", "hf", tmp_path / "hf")
    quantize_model(tmp_path / "hf", tmp_path / "back", scheme="asis")
    with Artifact.open(tmp_path / "four") as first, Artifact.open(tmp_path / "back") as second:
        assert second.records[Q].scheme == {"name": "asis-ternary", "group_size": 128, "levels": 4}
        assert second.manifest["tensors"][Q]["proof"]["code_3"] > 0
        np.testing.assert_array_equal(first[Q].dequantize(), second[Q].dequantize())
