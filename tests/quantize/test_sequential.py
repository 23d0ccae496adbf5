"""Calibration behind what is stored: sums against runs of the stored model, aims against least squares, kills."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from trapetum.errors import OutputError, RecipeError
from trapetum.formats.source import open_source
from trapetum.kernels.cpu.pool import Pool
from trapetum.progress import Progress
from trapetum.quantize.job import quantize_model
from trapetum.quantize.plan import make_plan
from trapetum.quantize.recipe import resolve_recipe
from trapetum.quantize.sequential import Aims, StageMoments
from trapetum.runtime.calibrate import collect
from trapetum.runtime.model import Model
from trapetum.runtime.paired import PairedInputs, paired_stages
from trapetum.tensors import DenseTensor

IDS = np.random.default_rng(5).integers(0, 80, (6, 32)).astype(np.intp)


class Replaced:
    """A source some of whose tensors are others."""

    def __init__(self, inner: object) -> None:
        self.inner, self.values = inner, dict[str, np.ndarray]()

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def load(self, name: str, rows: slice | None = None) -> object:
        if name not in self.values:
            return self.inner.load(name, rows)
        return DenseTensor(self.values[name] if rows is None else self.values[name][rows])


def replace_all(stored: Replaced, names: tuple[str, ...]) -> None:
    for name in names:
        values = stored.inner.load(name).dequantize()
        stored.values[name] = np.round(values * 8) / 8


def test_moments_are_those_that_the_stored_model_sees(make_model: Callable[..., Path]) -> None:
    with open_source(make_model()) as source:
        stored, pool, order = Replaced(source), Pool(2), []
        found: dict[str, PairedInputs] = {}
        for inputs in paired_stages(source, stored, IDS, pool, wanted=lambda weights: True):
            (one,) = inputs
            found |= dict.fromkeys(one.weights, one)
            order.append(one.weights[0].rpartition(".")[0].rpartition(".")[2])
            replace_all(stored, one.weights)
        assert order == [*(["q_proj", "o_proj", "gate_proj", "down_proj"] * 2), "lm_head"]
        # Everything before a weight is replaced when its input is seen: one run of the replaced model sees the same.
        for inputs in collect(stored, IDS, pool, moments=True):
            assert np.allclose(found[inputs.weights[0]].moment, inputs.moment, rtol=1e-4, atol=1e-3)
        first = found["model.layers.0.self_attn.q_proj.weight"]
        assert not first.cross.any()  # both read the embedding
        assert first.drift is None
        down = found["model.layers.1.mlp.down_proj.weight"]
        # After the last half layer: the streams of the original and of the model with all but this weight replaced.
        del stored.values["model.layers.1.mlp.down_proj.weight"]
        seen: list[np.ndarray] = []
        models = [Model(source, pool), Model(stored, pool)]
        streams = []
        with pool.session():
            for model in models:
                h = model.embedding(IDS.reshape(-1)).reshape(*IDS.shape, -1)
                rotary = model.rotary(0, 32, 32)
                for layer in model.layers:
                    seen.clear()
                    state = layer.mixer.new_state(len(h), 32)

                    def observe(part: str, x: np.ndarray, expert: int | None = None) -> None:
                        if part == "down":
                            seen.append(x.copy())

                    layer(h, state, 0, rotary[layer.rope], pool, observe)
                streams.append(h.reshape(-1, h.shape[-1]).astype(np.float64))
        assert np.allclose(down.drift, (streams[0] - streams[1]).T @ seen[0], rtol=1e-3, atol=1e-2)
        assert down.cross is None
        pool.close()


def test_an_aim_is_the_share_of_the_damped_least_squares(make_model: Callable[..., Path]) -> None:
    rng = np.random.default_rng(0)
    name = "model.layers.0.self_attn.o_proj.weight"
    x = rng.standard_normal((4000, 64))
    y = x + 0.3 * rng.standard_normal((4000, 64)) @ rng.standard_normal((64, 64)) / 8
    sums = {"moment": y.T @ y, "tokens": 4000}
    with open_source(make_model()) as source:
        plan = make_plan(source, resolve_recipe(None, bits=4))
        row = next(r for r in plan.rows if r.name == name)
        weight = source.load(name).dequantize().astype(np.float64)
        solved = y.T @ y / 4000
        solved[np.diag_indices(64)] += 0.1 * solved.diagonal().mean()
        wanted = weight + 0.75 * weight @ ((x - y).T @ y / 4000) @ np.linalg.inv(solved)
        lost = weight @ (x - y).T  # what the original's outputs have more
        for one in (
            PairedInputs((name,), cross=(x - y).T @ y, **sums),
            PairedInputs((name,), drift=lost @ y, **sums),
        ):
            aims = Aims(StageMoments(Path("text"), [one]), inputs=[one])
            found = aims.aim(row, slice(8, 24), weight[8:24].astype(np.float32))
            assert np.allclose(found, wanted[8:24], atol=1e-5)
            before, after = (np.square(weight @ x.T - w @ y.T).sum() for w in (weight, wanted))
            assert after < 0.9 * before
        few = PairedInputs((name,), tokens=900, moment=y.T @ y, cross=(x - y).T @ y)
        assert not Aims(StageMoments(Path("text"), [few]), inputs=[few])._changes


TEXT = "the quick brown fox jumps over the lazy dog and runs away from all of them again. " * 60


class Stop(Progress):
    """Ends a job after some finished tensors."""

    def __init__(self, tensors: int) -> None:
        self.left = tensors

    def advance(self, amount: int, line: str | None = None) -> None:
        self.left -= line is not None
        if self.left == 0:
            raise KeyboardInterrupt


@pytest.fixture
def options(tmp_path: Path, demo_model: Path) -> dict[str, object]:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    return {"calibrate": text, "calib_tokens": 512, "sequential": True, "bits": 3}


@pytest.mark.slow
def test_same_bytes_after_a_stop_and_at_any_thread_count(
    demo_model: Path, tmp_path: Path, options: dict[str, object]
) -> None:
    quantize_model(demo_model, tmp_path / "whole", threads=2, **options)
    with pytest.raises(KeyboardInterrupt):
        quantize_model(demo_model, tmp_path / "out", threads=1, progress=Stop(9), **options)
    other = {**options, "calib_tokens": 1024}
    with pytest.raises(OutputError, match="calibration"):
        quantize_model(demo_model, tmp_path / "out", **other)
    (tmp_path / "text.txt").write_text(TEXT + "more")
    with pytest.raises(OutputError, match="calibration"):
        quantize_model(demo_model, tmp_path / "out", **options)
    (tmp_path / "text.txt").write_text(TEXT)
    report = quantize_model(demo_model, tmp_path / "out", threads=1, **options)
    assert report.resumed >= 9
    assert (tmp_path / "out/SHA256SUMS").read_bytes() == (tmp_path / "whole/SHA256SUMS").read_bytes()


def test_sequential_needs_a_text(make_model: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="sequential goes with calibrate"):
        quantize_model(make_model(), tmp_path / "out", sequential=True)


def test_a_model_that_overflows_is_refused_without_warnings(make_model: Callable[..., Path]) -> None:
    change = {"model.layers.0.input_layernorm.weight": np.ones(64, np.float32)}
    change["model.layers.0.self_attn.q_proj.weight"] = np.full((64, 64), 3e38, np.float32)
    with open_source(make_model(change=change)) as source:
        stages = paired_stages(source, source, IDS, Pool(2), wanted=lambda weights: True)
        with pytest.raises(RecipeError, match="the model overflows float32"):
            list(stages)
