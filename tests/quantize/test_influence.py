"""Budgets with a calibration text: what the model itself loses decides, and what it does not feel gets least."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from trapetum.formats.packed_ternary import open_checkpoint
from trapetum.progress import Progress
from trapetum.quantize.budget import allocate
from trapetum.quantize.influence import Change, influence
from trapetum.quantize.job import quantize_model
from trapetum.quantize.plan import make_plan
from trapetum.quantize.recipe import resolve_recipe
from trapetum.quantize.schemes import KMeans

tokenizers = pytest.importorskip("tokenizers")

Make = Callable[..., Path]
Bytes = Callable[[Path], dict[str, bytes]]
WIDE = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "head_dim": 64}
OUTPUT = "model.layers.1.self_attn.o_proj.weight"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    words = np.random.default_rng(0).integers(0, 80, 1600)
    path = tmp_path / "text.txt"
    path.write_text(" ".join(f"w{i}" for i in words))
    return path


@pytest.fixture
def deaf(make_model: Make) -> Path:
    """A model whose last attention hardly reaches the stream, of weights that no error measure tells from others."""
    weight = np.random.default_rng(1).standard_normal((256, 256)) * 1e-6
    model = make_model(
        fill=lambda rng, rows, columns: rng.standard_normal((rows, columns)) * 0.1,
        change={OUTPUT: weight.astype(ml_dtypes.bfloat16)},
        max_position_embeddings=64,
        **WIDE,
    )
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(80)}, "w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(model / "tokenizer.json"))
    return model


def test_what_the_model_does_not_feel_gets_least(deaf: Path, text: Path) -> None:
    with open_checkpoint(deaf) as source:
        plan = make_plan(source, resolve_recipe(target_bpw=5.0))
        free, known = (allocate(plan, 2, Progress(), t) for t in (None, text))
        rows = {row.name: row for row in plan.rows}
        changes = [
            Change((rows[f"model.layers.{i}.self_attn.{part}_proj.weight"],), KMeans(8))
            for i in range(2)
            for part in "vo"
        ]
        first_v, first_o, last_v, last_o = influence(plan, changes, text, 1, Progress())
    assert min(first_v, first_o) > 1e3 * max(last_v, last_o)
    sizes = [{r.name: r.scheme.codebook_size for r in p.rows if r.quantized} for p in (free, known)]
    for part in "vo":
        name = f"model.layers.1.self_attn.{part}_proj.weight"
        assert sizes[1][name] < sizes[0][name]
    assert known.quantized_bpw <= 5.0


class Notes(Progress):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, text: str) -> None:
        """Keep it."""
        self.said.append(text)


def test_what_is_too_large_to_hold_counts_by_its_prior(
    deaf: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trapetum.quantize.influence._MOST_HELD", 4 * 256 * 256)
    with open_checkpoint(deaf) as source:
        plan, progress = make_plan(source, resolve_recipe(target_bpw=5.0)), Notes()
        rows = {row.name: row for row in plan.rows}
        large, small = (
            Change((rows[f"model.layers.0.{part}_proj.weight"],), KMeans(8))
            for part in ("mlp.up", "self_attn.o")
        )
        found = influence(plan, [large, small], text, 1, progress)
        assert np.isnan(found[0])
        assert found[1] > 0
        assert [note for note in progress.said if note.startswith("1 of 2 groups")]
        monkeypatch.setattr("trapetum.quantize.influence._MOST_HELD", 0)
        free, none = (allocate(plan, 1, Progress(), t) for t in (None, text))
    assert [r.scheme for r in none.rows] == [r.scheme for r in free.rows]


@pytest.mark.parametrize("others", [1e-3, np.inf, np.nan, 0.0])
def test_what_breaks_the_model_gets_most(
    deaf: Path, text: Path, monkeypatch: pytest.MonkeyPatch, others: float
) -> None:
    broken = "model.layers.1.self_attn.q_proj.weight"
    monkeypatch.setattr(
        "trapetum.quantize.influence.divergences",
        lambda source, wanted, *a: [np.inf if broken in names else others for _, names in wanted],
    )
    with open_checkpoint(deaf) as source:
        plan = allocate(make_plan(source, resolve_recipe(target_bpw=4.0)), 1, Progress(), text)
    sizes = {r.name: r.scheme.codebook_size for r in plan.rows if r.quantized and r.role.layer is not None}
    assert sizes[broken] == max(sizes.values()) >= 64 or others == np.inf
    assert 3.9 < plan.quantized_bpw <= 4.0 or others == 0.0
    assert "nan" not in plan.notes[-1]


def test_a_job_measures_once_and_at_any_thread_count(
    deaf: Path, text: Path, tmp_path: Path, identity: Bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"calibrate": text, "calib_tokens": 512, "target_bpw": 5.0}
    for threads in (1, 3):
        quantize_model(deaf, tmp_path / f"out{threads}", threads=threads, **options)  # type: ignore[arg-type]
    assert identity(tmp_path / "out1") == identity(tmp_path / "out3")
    monkeypatch.setattr("trapetum.quantize.influence.divergences", lambda *a: pytest.fail("measured again"))
    recipe = tmp_path / "out1/recipe.toml"
    quantize_model(deaf, tmp_path / "again", recipe=recipe, calibrate=text, calib_tokens=512)
    weights = [next((tmp_path / n).glob("*.safetensors")).read_bytes() for n in ("out1", "again")]
    assert weights[0] == weights[1]
