"""Plans: every tensor accounted for, every offender named, every promised byte kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from trapetum.errors import CheckpointError, RecipeError, UnsupportedModelError
from trapetum.formats.checkpoint import Checkpoint
from trapetum.quantize.blocks import memory_budget
from trapetum.quantize.job import quantize_model
from trapetum.quantize.plan import Plan, make_plan
from trapetum.quantize.recipe import resolve_recipe
from trapetum.quantize.schemes import Keep, KMeans

Make = Callable[..., Path]


def plan(folder: Path, any_architecture: bool = False, **recipe: Any) -> Plan:
    with Checkpoint.open(folder) as source:
        return make_plan(source, resolve_recipe(**recipe), any_architecture=any_architecture)


def test_default_rules(make_model: Make) -> None:
    made = plan(make_model(), bits=4)
    schemes = {r.name: r.scheme for r in made.rows}
    assert schemes["model.embed_tokens.weight"] == schemes["model.norm.weight"] == Keep()
    assert schemes["lm_head.weight"] == KMeans(256)
    assert {s for n, s in schemes.items() if "_proj" in n} == {KMeans(16)}
    assert made.parameters == sum(r.parameters for r in made.rows)
    row = next(r for r in made.rows if r.name.endswith("0.mlp.down_proj.weight"))  # 64 x 96
    assert row.nbytes == 64 * 96 // 2 + 64 * 16 * 2
    assert row.bpw == 8 * row.nbytes / (64 * 96)
    json.dumps(made.to_dict())


def test_what_is_no_matrix_of_floats_is_kept_whatever_a_rule_says(make_model: Make) -> None:
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32),
        "model.layers.0.self_attn.masked_bias": np.array(-np.inf, np.float32),
        "model.position_ids": np.arange(6, dtype=np.int64)[None],
        "model.scaled": np.zeros((0,), np.float32),
        "model.extra.é/你 好.weight": np.ones((4, 8), np.float32),
        "model.layers.0.self_attn.q_proj.bias": np.ones(64, ml_dtypes.bfloat16),
    }
    made = plan(make_model(change=extra), recipe={"rules": [{"glob": "*", "bits": 3}]})
    rows = {r.name: r for r in made.rows}
    assert {n for n in extra if rows[n].quantized} == {"model.extra.é/你 好.weight"}  # the rule asked for it
    assert not rows["model.norm.weight"].quantized
    made = plan(make_model(change=extra, name="again"), bits=3)
    assert not any(r.quantized for r in made.rows if r.name in extra)
    notes = "\n".join(made.notes)
    assert "3 buffers that code recomputes; kept as they are" in notes
    assert "2 tensors that the architecture does not know; kept as they are" in notes
    assert "model.extra.é/你 好.weight" in notes


def test_a_weight_of_integers_is_kept_and_named(make_model: Callable[..., Path]) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    with Checkpoint.open(make_model(change={name: np.ones((64, 64), np.int32)})) as source:
        plan = make_plan(source, resolve_recipe(bits=4))
    assert f"weights of integers are kept as they are: {name} (int32)" in plan.notes


def test_all_offenders_are_named_at_once(make_model: Make) -> None:
    folder = make_model(
        change={
            "model.layers.0.mlp.up_proj.weight": np.ones((96, 65), np.float32),
            "model.norm.weight": np.ones(63, np.float32),
        },
        drop=("model.layers.1.self_attn.q_proj.weight",),
    )
    with pytest.raises(CheckpointError) as caught:
        plan(folder)
    for text in (
        "model.layers.0.mlp.up_proj.weight is [96, 65], not [96, 64]",
        "model.norm.weight is [63], not [64]",
        "model.layers.1.self_attn.q_proj.weight is missing",
    ):
        assert text in caught.value.message
    assert "\n" not in caught.value.message


def test_unknown_architectures_are_refused_by_name(make_model: Make) -> None:
    folder = make_model(architectures=["BambaForCausalLM"], model_type="bamba")
    with pytest.raises(UnsupportedModelError, match=r"BambaForCausalLM.*known are.*LlamaForCausalLM"):
        plan(folder)
    made = plan(folder, any_architecture=True)
    assert any(r.quantized for r in made.rows)
    assert any("roles are guessed from names" in n for n in made.notes)


def test_packed_checkpoints_are_refused_by_name(make_model: Make) -> None:
    with pytest.raises(UnsupportedModelError, match=r"already quantized \(gptq\)"):
        plan(make_model(quantization_config={"quant_method": "gptq", "bits": 4}))


class TestHead:
    HEAD = ("lm_head.weight",)

    def test_tied_without_a_head(self, make_model: Make) -> None:
        made = plan(make_model(drop=self.HEAD, tie_word_embeddings=True))
        assert "lm_head.weight" not in {r.name for r in made.rows}
        assert made.config["tie_word_embeddings"] is True

    def test_untied_without_a_head(self, make_model: Make) -> None:
        with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing") as caught:
            plan(make_model(drop=self.HEAD))
        assert "tie_word_embeddings" in (caught.value.hint or "")

    def test_flag_missing_and_no_head(self, make_model: Make) -> None:
        made = plan(make_model(drop=self.HEAD, tie_word_embeddings=...))
        assert made.config["tie_word_embeddings"] is True
        assert any("the embedding is the head" in n for n in made.notes)

    def test_an_identical_head_is_stored_once(self, make_model: Make) -> None:
        same = np.random.default_rng(0).standard_normal((80, 64)).astype(ml_dtypes.bfloat16)
        change = {"model.embed_tokens.weight": same, "lm_head.weight": same}
        made = plan(make_model(change=change, tie_word_embeddings=True))
        assert "lm_head.weight" not in {r.name for r in made.rows}
        assert any("stored once" in n for n in made.notes)

    def test_another_head_counts(self, make_model: Make) -> None:
        made = plan(make_model(tie_word_embeddings=True))
        assert "lm_head.weight" in {r.name for r in made.rows}
        assert made.config["tie_word_embeddings"] is False
        assert any("the two differ" in n for n in made.notes)

    @pytest.mark.parametrize("tied", [True, False])
    def test_a_wrapped_config_says_it_in_both_places(self, make_model: Make, tied: bool) -> None:
        """Where the source said both of a head that is not there, or that one is tied that differs."""
        folder = make_model(drop=self.HEAD if tied else (), tie_word_embeddings=True)
        inner = json.loads((folder / "config.json").read_text())
        outer = {"tie_word_embeddings": not tied} if tied else {}
        (folder / "config.json").write_text(json.dumps({**outer, "text_config": inner}))
        made = plan(folder).config
        assert made["tie_word_embeddings"] is tied
        assert made["text_config"] == inner | {"tie_word_embeddings": tied}


def test_idle_rules_and_short_rows_are_said(make_model: Make) -> None:
    made = plan(make_model(), recipe={"bits": 8, "rules": [{"glob": "*.nothing", "keep": True}]})
    assert any('rules[0] (glob = ["*.nothing"]) selects no tensor' in n for n in made.notes)
    short = next(n for n in made.notes if "short rows" in n)
    assert "tensors: 15" in short
    assert "kmeans K=256" in short


def test_memory_limits(make_model: Make) -> None:
    made = plan(make_model())
    assert made.budget(2).peak < made.budget(16).peak <= 1 << 30
    assert made.budget(2, 400 << 20).peak <= 400 << 20
    with pytest.raises(RecipeError, match="max_memory is 1,000 bytes"):
        made.budget(2, 1000)
    with pytest.raises(RecipeError, match="threads is 0"):
        made.budget(0)


def needs_wide(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Gaussian, with one value per tensor that float16 cannot hold in every other tensor."""
    out = rng.standard_normal((rows, columns)) * 0.05
    if rng.integers(2):
        out[rows // 2, 3] = 1e5
    return out


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32, np.float64])
def test_promised_bytes_are_written(make_model: Make, tmp_path: Path, bits: int, dtype: type) -> None:
    folder = make_model(fill=needs_wide, dtype=dtype)
    options: dict[str, Any] = {"bits": bits, "max_shard_size": 30_000, "effort": "fast"}
    promised = quantize_model(folder, tmp_path / "out", dry_run=True, **options)
    assert not (tmp_path / "out").exists()
    assert promised.dry_run
    wide = {r.wide for r in promised.rows if r.quantized}
    # Short float32 rows have fewer distinct values than 256, and float16 cannot hold those: all are wide.
    assert wide == ({True} if bits == 8 and dtype != ml_dtypes.bfloat16 else {True, False})
    report = quantize_model(folder, tmp_path / "out", **options)
    written = {p.name: p.stat().st_size for p in (tmp_path / "out").glob("*.safetensors")}
    assert promised.weight_files == report.weight_files == written
    assert len(written) > 1
    assert promised.bpw == report.bpw
    assert promised.predicted_seconds > 0


def test_the_memory_that_is_left_bounds_the_blocks() -> None:
    roomy = memory_budget(4, 4096, available=64 << 30)
    assert roomy == memory_budget(4, 4096)
    assert memory_budget(4, 4096, available=300 << 20).block_weights < roomy.block_weights
    assert memory_budget(64, 1 << 20, available=64 << 30).peak > 1 << 30
    with pytest.raises(RecipeError, match=r"about 100 MiB of memory are left to this process; 4 threads"):
        memory_budget(4, 4096, available=100 << 20)


def test_a_limit_on_addresses_is_seen(make_model: Make, tmp_path: Path) -> None:
    script = 'ulimit -v 450000; exec "$0" -m trapetum quantize "$1" -o "$2"'
    command = ["bash", "-c", script, sys.executable, str(make_model()), str(tmp_path / "out")]
    # BLAS reserves addresses for as many threads as there are cores.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 1, done.stderr
    assert "MiB of memory are left to this process" in done.stderr
    assert "ulimit -v" in done.stderr
    assert not (tmp_path / "out").exists()
