"""Bit budgets: what is promised of the size, of the choice, and of doing the same again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from trapetum.errors import CheckpointError, RecipeError
from trapetum.formats.checkpoint import Checkpoint
from trapetum.formats.imatrix import write_imatrix
from trapetum.progress import Progress
from trapetum.quantize.additive import Additive
from trapetum.quantize.budget import allocate, budgeted
from trapetum.quantize.job import quantize_model
from trapetum.quantize.plan import Plan, make_plan
from trapetum.quantize.recipe import Recipe, load_recipe, resolve_recipe
from trapetum.quantize.rules import Rule
from trapetum.quantize.schemes import KMeans
from trapetum.quantize.sensitivity import FIRST, PLAIN, measure, prior
from trapetum.quantize.shared_job import merge_parts

WIDE = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "head_dim": 64}
Make = Callable[..., Path]
Bytes = Callable[[Path], dict[str, bytes]]


def planned(source: Checkpoint, **options: object) -> Plan:
    return allocate(make_plan(source, resolve_recipe(**options)), 1, Progress())  # type: ignore[arg-type]


def schemes(plan: Plan) -> dict[str, object]:
    return {r.name: r.scheme for r in plan.rows if r.quantized}


def test_the_budget_is_kept_and_nearly_spent(make_model: Make) -> None:
    with Checkpoint.open(make_model(**WIDE)) as source:
        for target in (3.6, 4.5, 5.2, 7.0):
            plan = planned(source, target_bpw=target)
            assert target - 0.25 < plan.quantized_bpw <= target
            assert any(f"of {target:g} bits a weight" in n for n in plan.notes)


def test_sensitive_tensors_get_more(make_model: Make) -> None:
    with Checkpoint.open(make_model(**WIDE)) as source:
        plan = planned(source, target_bpw=5.0)
    sizes = {
        name.split(".", 2)[2]: s.codebook_size for name, s in schemes(plan).items() if "layers.1" in name
    }  # type: ignore[attr-defined]
    assert sizes["1.self_attn.v_proj.weight"] > sizes["1.self_attn.q_proj.weight"]
    assert sizes["1.mlp.gate_proj.weight"] == sizes["1.mlp.up_proj.weight"]


def test_a_tensor_that_is_harder_to_store_gets_more(
    make_model: Make, palette_rows: Callable[..., np.ndarray]
) -> None:
    """Values on eight points need three bits; the budget sees it and spends elsewhere."""
    easy = "model.layers.1.self_attn.v_proj.weight"
    change = {easy: palette_rows(np.random.default_rng(0), 128, 256).astype(ml_dtypes.bfloat16)}
    with Checkpoint.open(make_model(change=change, **WIDE)) as source:
        plan = planned(source, target_bpw=4.6)
    assert schemes(plan)[easy] == KMeans(8)
    assert schemes(plan)[easy.replace("layers.1", "layers.0")].codebook_size > 8  # type: ignore[attr-defined]


def test_the_saved_recipe_gives_the_same_bytes(make_model: Make, tmp_path: Path, identity: Bytes) -> None:
    folder = make_model(**WIDE)
    first = quantize_model(folder, tmp_path / "a", target_bpw=4.7, effort="fast", threads=2)
    saved = tmp_path / "a/recipe.toml"
    again = quantize_model(folder, tmp_path / "b", recipe=saved, threads=1)
    assert identity(tmp_path / "a") == identity(tmp_path / "b")
    assert {s.effort for s in schemes(first.plan).values()} == {"fast"}  # type: ignore[attr-defined]
    assert not any("budget" in n for n in again.notes)  # nothing was left to choose
    assert load_recipe(saved).resolved() == first.plan.recipe.resolved()
    manifest = json.loads((tmp_path / "a/trapetum.json").read_text())
    assert resolve_recipe(manifest["recipe"]).resolved() == first.plan.recipe.resolved()


def test_parts_agree_without_a_word(make_model: Make, tmp_path: Path, identity: Bytes) -> None:
    folder = make_model(**WIDE)
    quantize_model(folder, tmp_path / "whole", bits=4.5, threads=1)
    for part in ("2/2", "1/2"):
        quantize_model(folder, tmp_path / "parts", bits=4.5, part=part, threads=1)
    merge_parts(tmp_path / "parts")
    assert identity(tmp_path / "whole") == identity(tmp_path / "parts")


def test_a_stopped_job_goes_on_with_its_choice(
    make_model: Make, tmp_path: Path, identity: Bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model(**WIDE)
    quantize_model(folder, tmp_path / "whole", target_bpw=4.5, threads=1)

    class Stopped(Progress):
        def advance(self, count: int, line: str | None = None) -> None:
            if line and "layers.1" in line:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_model(folder, tmp_path / "out", target_bpw=4.5, threads=1, progress=Stopped())
    monkeypatch.setattr("trapetum.quantize.budget.measure", lambda *a: pytest.fail("measured again"))
    report = quantize_model(folder, tmp_path / "out", target_bpw=4.5, threads=1)
    assert report.resumed > 0
    assert identity(tmp_path / "whole") == identity(tmp_path / "out")


def test_a_dry_run_says_what_the_run_does(make_model: Make, tmp_path: Path) -> None:
    folder = make_model(**WIDE)
    said = quantize_model(folder, tmp_path / "out", target_bpw=5.1, dry_run=True)
    done = quantize_model(folder, tmp_path / "out", target_bpw=5.1)
    assert schemes(said.plan) == schemes(done.plan)
    assert said.quantized_bpw == done.quantized_bpw


def test_rules_with_bits_are_paid_first(make_model: Make) -> None:
    rules = [{"role": "o", "bits": 8}, {"role": "down", "effort": "fast"}, {"role": "q", "keep": True}]
    with Checkpoint.open(make_model(**WIDE)) as source:
        plan = planned(source, recipe={"target_bpw": 7.5, "rules": rules})
        assert budgeted(make_plan(source, resolve_recipe({"target_bpw": 7.5, "rules": rules})))
        assert not budgeted(make_plan(source, plan.recipe))
        assert schemes(planned(source, recipe=plan.recipe)) == schemes(plan)
    for name, scheme in schemes(plan).items():
        assert isinstance(scheme, KMeans)
        assert "q_proj" not in name
        assert scheme.effort == ("fast" if "down_proj" in name else "default")
        if "o_proj" in name:
            assert scheme.codebook_size == 256
    assert plan.quantized_bpw <= 7.5


def test_named_candidates_alone_are_chosen(make_model: Make) -> None:
    with Checkpoint.open(make_model(**WIDE)) as source:
        plan = planned(source, target_bpw=6.5, candidates=["gguf:Q4_0", "gguf:Q8_0"])
        labels = {r.scheme.label for r in plan.rows if r.quantized and r.role.kind != "head"}
        assert labels == {"gguf:Q4_0", "gguf:Q8_0"}
        only = planned(source, target_bpw=4.5, scheme="kmeans")
        assert only.recipe.candidates == ("kmeans",)


def test_a_weight_that_a_candidate_cannot_hold(make_model: Make, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.gate_proj.weight"
    values = np.random.default_rng(2).standard_normal((384, 256)) * 0.05
    values[100, 3] = 1e5
    folder = make_model(change={name: values.astype(np.float32)}, **WIDE)
    with Checkpoint.open(folder) as source:
        plan = planned(source, target_bpw=6.5, candidates=["gguf:Q4_0", "kmeans"])
        assert isinstance(schemes(plan)[name], KMeans)
    with pytest.raises(CheckpointError, match=rf"{name} holds a weight of magnitude 100000.*float16"):
        quantize_model(folder, tmp_path / "out", target_bpw=6.5, candidates=["gguf:Q4_0"], dry_run=True)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_the_measure_leaves_bad_weights_to_the_survey(make_model: Make, tmp_path: Path, value: float) -> None:
    values = np.random.default_rng(2).standard_normal((384, 256)).astype(np.float32)
    values[::3, ::5] = value
    change = {"model.layers.0.mlp.gate_proj.weight": values}
    options = {"target_bpw": 6.5, "candidates": ["gguf:Q4_0", "ternary"], "dry_run": True}
    with pytest.raises(CheckpointError, match="only finite weights"):
        quantize_model(make_model(change=change, **WIDE), tmp_path / "out", **options)


def mixture(make_model: Make) -> Path:
    """Qwen3-MoE: four experts in each of two layers."""
    rng = np.random.default_rng(3)
    change, drop = {}, []
    for layer in range(2):
        p = f"model.layers.{layer}."
        drop += [f"{p}mlp.{m}_proj.weight" for m in ("gate", "up", "down")]
        shapes = {
            f"{p}mlp.gate.weight": (4, 256),
            f"{p}self_attn.q_norm.weight": (64,),
            f"{p}self_attn.k_norm.weight": (64,),
        }
        for e in range(4):
            x = f"{p}mlp.experts.{e}."
            shapes |= {
                x + "gate_proj.weight": (64, 256),
                x + "up_proj.weight": (64, 256),
                x + "down_proj.weight": (256, 64),
            }
        change |= {n: (rng.standard_normal(s) * 0.05).astype(ml_dtypes.bfloat16) for n, s in shapes.items()}
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    family = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    return make_model(change=change, drop=tuple(drop), **(WIDE | family | moe))


def test_experts_of_a_layer_take_one_scheme_and_one_glob(make_model: Make) -> None:
    folder = mixture(make_model)
    with Checkpoint.open(folder) as source:
        plan = planned(source, target_bpw=7.0)
        found = schemes(plan)
        for layer in range(2):
            experts = f"model.layers.{layer}.mlp.experts."
            assert (
                len({found[f"{experts}{e}.{p}_proj.weight"] for e in range(4) for p in ("gate", "up")}) == 1
            )
            assert len({found[f"{experts}{e}.down_proj.weight"] for e in range(4)}) == 1
        globs = [g for rule in plan.recipe.rules for g in rule.glob or ()]
        assert "model.layers.0.mlp.experts.*.gate_proj.weight" in globs
        assert not any(".experts.1." in g for g in globs)
        # A rule for one expert alone: the glob of the others must not reach it.
        fixed = "model.layers.0.mlp.experts.2.up_proj.weight"
        own = planned(source, recipe={"target_bpw": 7.0, "rules": [{"glob": fixed, "bits": 8}]})
        assert schemes(own)[fixed] == KMeans(256)
        assert own.quantized_bpw <= 7.0


@pytest.mark.slow
def test_low_budgets_consider_additive_codebooks(make_model: Make) -> None:
    with Checkpoint.open(make_model(hidden_size=64, intermediate_size=2048, num_hidden_layers=1)) as source:
        plan = planned(
            source, recipe={"target_bpw": 3.4, "rules": [{"role": ["attention", "head"], "keep": True}]}
        )
    assert any(isinstance(s, Additive) for s in schemes(plan).values())


def test_the_mix_of_gguf_types_is_open_for_rows_of_any_block(make_model: Make) -> None:
    """Rows of 384 are no whole blocks of 256: types of 32 weights are among the candidates."""
    with Checkpoint.open(make_model(**WIDE)) as source:
        recipe = resolve_recipe("gguf-mix")
        assert recipe.target_bpw == 4.5
        assert all(c.startswith("gguf:") for c in recipe.candidates or ())
        plan = make_plan(source, recipe)
        assert budgeted(plan)
        assert all(
            any(
                recipe.scheme_of(Rule(glob=["*"], scheme=c)).misfit(r.shape) is None
                for c in recipe.candidates or ()
            )
            for r in plan.rows
            if r.quantized
        )


def test_ties(make_model: Make) -> None:
    with Checkpoint.open(make_model(**WIDE)) as source:
        plan = planned(source, recipe={"target_bpw": 4.8, "tie": ["qkv"]})
    found = schemes(plan)
    for layer in range(2):
        assert len({found[f"model.layers.{layer}.self_attn.{p}_proj.weight"] for p in "qkv"}) == 1


def test_the_importance_of_inputs_counts(make_model: Make, tmp_path: Path) -> None:
    """Inputs that are never excited cost little: what is rough only there is little loss."""
    name = "model.layers.1.mlp.down_proj.weight"
    rng = np.random.default_rng(0)
    half = np.concatenate(
        [rng.choice([-0.05, 0.05], (256, 192)), rng.standard_normal((256, 192)) * 0.03], axis=1
    )
    folder = make_model(change={name: half.astype(ml_dtypes.bfloat16)}, **WIDE)
    quiet = np.concatenate([np.ones(192), np.zeros(192)]).astype(np.float64)
    write_imatrix(tmp_path / "im.gguf", {name: (quiet * 100, 100)}, datasets=["x"], chunk_size=100)
    plain = quantize_model(folder, tmp_path / "a", target_bpw=5.0, dry_run=True)
    known = quantize_model(folder, tmp_path / "b", target_bpw=5.0, dry_run=True, imatrix=tmp_path / "im.gguf")
    assert schemes(known.plan)[name].codebook_size < schemes(plain.plan)[name].codebook_size  # type: ignore[attr-defined]


def test_measured_error_is_that_of_the_whole_tensor(make_model: Make) -> None:
    with Checkpoint.open(make_model(**WIDE)) as source:
        plan = make_plan(source, resolve_recipe(bits=4))
        row = next(r for r in plan.rows if r.role.kind == "gate")
        found = measure(plan, row, [KMeans(4), KMeans(16)])
        weight = source.load(row.name).values
        for k, error in zip((4, 16), found, strict=True):
            lost, squares = KMeans(k).errors(weight, KMeans(k).quantize(weight))
            assert error == pytest.approx(lost.sum() / squares.sum(), rel=0.05)
        assert prior(row, 2, 1, moments=False) == PLAIN["gate"] * FIRST["gate"]
        late = replace(row, role=replace(row.role, layer=1))
        assert prior(late, 2, 4, moments=False) == PLAIN["gate"] / 4


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"bits": 4, "target_bpw": 4.0}, "bits and target_bpw exclude"),
        ({"bits": 3.5, "target_bpw": 4.0}, "exclude each other"),
        ({"scheme": "ternary", "target_bpw": 4.0}, "leaves nothing to choose"),
        ({"target_bpw": 4.0, "candidates": ["asis"]}, "found in the weights"),
        ({"target_bpw": 4.0, "candidates": ["qq"]}, "candidates: is 'qq'"),
        ({"recipe": {"target_bpw": 17}}, "target_bpw: "),
        ({"bits": 4, "candidates": ["kmeans"]}, "there is no target_bpw"),
        ({"recipe": {"candidates": ["kmeans"]}}, "there is no target_bpw"),
        ({"bits": 4, "recipe": {"target_bpw": 4.5}}, "bits and target_bpw exclude"),
        ({"scheme": "ternary", "recipe": {"target_bpw": 4.5}}, "leaves nothing to choose"),
        ({"recipe": {"target_bpw": 4, "tie": ["x"]}}, "tie"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, object], text: str) -> None:
    with pytest.raises(RecipeError, match=text):
        resolve_recipe(**options)  # type: ignore[arg-type]


def test_too_little_is_refused_with_the_least(make_model: Make) -> None:
    with (
        Checkpoint.open(make_model(**WIDE)) as source,
        pytest.raises(RecipeError, match=r"target_bpw is 1\.5, but the smallest candidates take 2\.\d+ bits"),
    ):
        planned(source, target_bpw=1.5)


def test_fractions_are_budgets() -> None:
    assert resolve_recipe(bits=3.5).target_bpw == 3.5
    assert resolve_recipe(bits=1.58).target_bpw is None
    assert resolve_recipe(bits=4.0).target_bpw is None


@pytest.mark.parametrize("name", ["4bit-shared8", "3bit-shared8"])
def test_shared_experts_at_eight_bits(name: str) -> None:
    recipe = resolve_recipe(name)
    low = int(name[0])
    for tensor, bits in {
        "model.layers.3.mlp.shared_expert.gate_proj.weight": 8,
        "model.layers.3.mlp.shared_experts.down_proj.weight": 8,
        "model.layers.3.mlp.experts.7.up_proj.weight": low,
        "model.layers.3.self_attn.q_proj.weight": low,
    }.items():
        rule = recipe.rules[recipe.find(tensor, "up", 3, "mlp.experts" in tensor) or 0]
        assert recipe.scheme_of(rule) == KMeans(1 << bits)


def test_recipes_as_toml() -> None:
    recipe = resolve_recipe(
        {
            "name": 'a "b"',
            "target_bpw": 4.25,
            "rules": [{"glob": ["x\\y.*"], "bits": 3}, {"role": "o", "keep": True}],
        }
    )
    import tomllib

    assert Recipe.model_validate(tomllib.loads(recipe.to_toml())) == recipe
