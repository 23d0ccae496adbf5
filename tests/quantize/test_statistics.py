"""Jobs that know their inputs: moments against NumPy, bytes at any thread count, refusals before any work."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from trapetum.errors import OutputError, RecipeError, TrapetumError
from trapetum.formats.artifact import Artifact
from trapetum.formats.decoded import decoded
from trapetum.formats.imatrix import MomentsWriter, open_statistics, write_imatrix
from trapetum.formats.packed_ternary import open_checkpoint
from trapetum.formats.source import open_source
from trapetum.kernels.cpu.pool import Pool
from trapetum.progress import Progress
from trapetum.quantize.job import quantize_model
from trapetum.quantize.plan import make_plan
from trapetum.quantize.recipe import resolve_recipe
from trapetum.quantize.statistics import Statistics, collect_importance
from trapetum.runtime.calibrate import collect, distinct_inputs

Q = "model.layers.0.self_attn.q_proj.weight"


def moments_file(model: Path, out: Path, ids: np.ndarray, tokens: int | None = None) -> Path:
    with open_source(model) as source:
        pool = Pool(2)
        with MomentsWriter(out, distinct_inputs(source)) as writer:
            for inputs in collect(source, ids, pool, moments=True):
                writer.write(inputs.weights, inputs.moment / inputs.tokens, tokens or inputs.tokens)
        pool.close()
    return out


@pytest.fixture
def ids() -> np.ndarray:
    return np.random.default_rng(3).integers(0, 80, (40, 32)).astype(np.intp)


def test_moments_of_the_first_input_are_those_of_the_normed_embedding(
    make_model: Callable[..., Path], ids: np.ndarray
) -> None:
    with open_source(make_model()) as source:
        pool = Pool(2)
        found = list(collect(source, ids, pool, moments=True))
        plain = list(collect(source, ids, pool))
        pool.close()
        x = source.load("model.embed_tokens.weight").dequantize()[ids.reshape(-1)].astype(np.float64)
        x /= np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-5)
        x *= source.load("model.layers.0.input_layernorm.weight").dequantize()
        assert [(i.weights, len(i.squares)) for i in found] == distinct_inputs(source)
    assert found[0].weights[0] == Q
    assert found[0].tokens == ids.size
    assert np.allclose(found[0].moment, x.T @ x, rtol=1e-4, atol=1e-3)
    for a, b in zip(found, plain):
        assert b.moment is None
        assert np.array_equal(a.moment, a.moment.T)
        assert np.allclose(a.squares, b.squares, rtol=1e-5)


@pytest.mark.parametrize("options", [{"bits": 3, "effort": "high"}, {"bits": 4}])
def test_same_bytes_at_any_thread_count_and_less_loss(
    make_model: Callable[..., Path], tmp_path: Path, ids: np.ndarray, options: dict[str, object]
) -> None:
    model = make_model()
    file = moments_file(model, tmp_path / "m", ids)
    outs = []
    for threads in (1, 3):
        out = tmp_path / f"out{threads}"
        quantize_model(model, out, imatrix=file, threads=threads, **options)
        outs.append({p.name: p.read_bytes() for p in out.iterdir() if p.name != "run.jsonl"})
    assert outs[0] == outs[1]
    assert json.loads(outs[0]["trapetum.json"])["calibration"]["file"] == "m"
    quantize_model(model, tmp_path / "free", **options)
    with (
        open_source(model) as source,
        open_source(file.parent / "out1") as one,
        Artifact.open(tmp_path / "free") as free,
    ):
        with open_statistics(file) as statistics:
            h = statistics.moment(Q, 64)[1].astype(np.float64)
        wanted = source.load(Q).dequantize()
        lost = [float(np.sum(((e := wanted - a.load(Q).dequantize()) @ h) * e)) for a in (one, free)]
    assert lost[0] < 0.9 * lost[1]


def test_too_few_tokens_mean_diagonals_and_are_said(
    make_model: Callable[..., Path], tmp_path: Path, ids: np.ndarray
) -> None:
    model = make_model()
    file = moments_file(model, tmp_path / "m", ids, tokens=100)
    report = quantize_model(model, tmp_path / "out", imatrix=file)
    assert any("fewer than 2 tokens for each input" in n for n in report.notes)


def test_heavier_damping_is_said(make_model: Callable[..., Path], tmp_path: Path, ids: np.ndarray) -> None:
    model = make_model()
    for tokens, said in (
        (64 * 8, ["15 tensors", "0.062 of their mean (model.layers.1.mlp.down_proj.weight)"]),
        (96 * 16, []),
    ):
        file = moments_file(model, tmp_path / f"m{tokens}", ids, tokens=tokens)
        notes = [
            n for n in quantize_model(model, tmp_path / f"o{tokens}", imatrix=file).notes if "damped" in n
        ]
        assert len(notes) == bool(said)
        assert [w for w in said if w not in "".join(notes)] == [], notes


def test_an_importance_file_of_another_model_is_refused(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    model = make_model()
    write_imatrix(tmp_path / "i", {"model.layers.9.mlp.up_proj.weight": (np.ones(64), 5)})
    with pytest.raises(RecipeError, match="knows none"):
        quantize_model(model, tmp_path / "out", imatrix=tmp_path / "i")
    write_imatrix(tmp_path / "i", {Q: (np.ones(32), 5)})
    with pytest.raises(TrapetumError, match="32 values"):
        quantize_model(model, tmp_path / "out", imatrix=tmp_path / "i")
    assert not (tmp_path / "out").exists()


def test_options_that_exclude_each_other(make_model: Callable[..., Path], tmp_path: Path) -> None:
    model = make_model()
    for options, words in (
        ({"imatrix": "a", "calibrate": "b"}, "exclude"),
        ({"calib_tokens": 5}, "calib_tokens"),
        ({"imatrix": "a", "workers": 2}, "not spread"),
    ):
        with pytest.raises(RecipeError, match=words):
            quantize_model(model, tmp_path / "out", **options)


def test_rotated_rows_take_the_moment_of_rotated_inputs(
    make_model: Callable[..., Path], tmp_path: Path, ids: np.ndarray
) -> None:
    model = make_model(hidden_size=128, intermediate_size=128)
    file = moments_file(model, tmp_path / "m", ids)
    options: dict[str, object] = {"scheme": "ternary", "levels": 4, "group_size": 64, "hadamard": True}
    quantize_model(model, tmp_path / "free", **options)
    quantize_model(model, tmp_path / "known", imatrix=file, **options)
    with (
        open_statistics(file) as statistics,
        open_source(model) as source,
        Artifact.open(tmp_path / "known") as known,
        Artifact.open(tmp_path / "free") as free,
    ):
        h = statistics.moment(Q, 128)[1].astype(np.float64)
        turn = known.rotation_of(Q)
        assert turn is not None
        plan = make_plan(open_checkpoint(model), resolve_recipe(None, **options))
        row = next(r for r in plan.rows if r.name == Q)
        found = Statistics(statistics, plan.rotation).importance(row)
        x = np.random.default_rng(0).standard_normal((300, 128)).astype(np.float32)
        rotated = turn.fold(x).astype(np.float64)  # x R^T: the same loss in the turned space
        assert np.allclose(
            ((x @ h) * x).sum(axis=1), ((rotated @ found.moment) * rotated).sum(axis=1), rtol=1e-4
        )
        wanted = source.load(Q).dequantize()
        lost = [float(np.sum(((e := wanted - decoded(a, Q)) @ h) * e)) for a in (known, free)]
    assert lost[0] < 0.8 * lost[1]


def test_an_unfinished_job_does_not_go_on_with_another_importance(
    make_model: Callable[..., Path], tmp_path: Path, ids: np.ndarray
) -> None:
    class Stop(Progress):
        def advance(self, amount: int, line: str | None = None) -> None:
            if line is not None:
                raise KeyboardInterrupt

    model = make_model()
    first, second = (moments_file(model, tmp_path / n, ids[: 40 - i]) for i, n in enumerate("ab"))
    with pytest.raises(KeyboardInterrupt):
        quantize_model(model, tmp_path / "out", imatrix=first, progress=Stop())
    for other in ({"imatrix": second}, {}):
        with pytest.raises(OutputError, match="calibration"):
            quantize_model(model, tmp_path / "out", **other)
    report = quantize_model(model, tmp_path / "out", imatrix=first)
    assert report.resumed > 0
    quantize_model(model, tmp_path / "whole", imatrix=first)
    sums = [(tmp_path / n / "SHA256SUMS").read_bytes() for n in ("out", "whole")]
    assert sums[0] == sums[1]


def test_single_inputs_are_raised_by_a_tenth_of_their_mean(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    squares = np.arange(64, dtype=np.float64) * 10
    write_imatrix(tmp_path / "i", {Q: (squares, 10)})
    plan = make_plan(open_checkpoint(make_model()), resolve_recipe(None, bits=4))
    row = next(r for r in plan.rows if r.name == Q)
    with open_statistics(tmp_path / "i") as file:
        assert np.allclose(Statistics(file).importance(row), np.arange(64) + 3.15)


@pytest.mark.parametrize(
    ("data", "text"), [(b"", "is empty"), (b"a\xff", "not UTF-8"), (None, "cannot be read")]
)
def test_a_text_that_is_none_is_refused_before_a_job_is_begun(
    make_model: Callable[..., Path], tmp_path: Path, data: bytes | None, text: str
) -> None:
    if data is not None:
        (tmp_path / "text.txt").write_bytes(data)
    with pytest.raises(TrapetumError, match=text):
        quantize_model(make_model(), tmp_path / "out", calibrate=tmp_path / "text.txt")
    assert not (tmp_path / "out/.trapetum/job.json").exists()


def test_an_importance_file_that_cannot_be_written_is_refused_before_the_pass(
    demo_model: Path, demo_text: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(OutputError, match="cannot be written"):
        collect_importance(demo_model, demo_text, tmp_path / "file/x.gguf", tokens=64, progress=NoPass())
    collect_importance(demo_model, demo_text, tmp_path / "new/x.gguf", tokens=64, progress=Progress())
    with open_statistics(tmp_path / "new/x.gguf") as found:
        assert found.kind == "gguf"


class NoPass(Progress):
    """Nothing may begin."""

    def begin(self, stage: str, total: int, unit: str = "B") -> None:
        raise AssertionError(stage)
