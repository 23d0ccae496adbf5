"""Ternary and GGUF-type schemes in recipes, plans and jobs: what fits, what falls back, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import trapetum
from trapetum.blocktypes import BLOCK_TYPES
from trapetum.errors import CheckpointError, RecipeError, UnsupportedModelError
from trapetum.formats.artifact import Artifact
from trapetum.formats.checkpoint import Checkpoint
from trapetum.formats.decoded import decoded
from trapetum.progress import Progress
from trapetum.quantize.block_scheme import Blocks
from trapetum.quantize.job import quantize_model
from trapetum.quantize.plan import Plan, make_plan
from trapetum.quantize.recipe import list_recipes, load_recipe, resolve_recipe
from trapetum.quantize.schemes import NAMED, Keep, KMeans, Options, scheme_from_spec
from trapetum.quantize.ternary import Ternary
from trapetum.quantize.ternary_search import fit_groups

WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32}
ODD = {**WIDE, "intermediate_size": 192}  # whole groups of 64, not of 128; no K-quant block


def plan_of(folder: Path, **options: object) -> Plan:
    with Checkpoint.open(folder) as source:
        return make_plan(source, resolve_recipe(**options))  # type: ignore[arg-type]


class Notes(Progress):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_1_58_bits_mean_ternary() -> None:
    recipe = resolve_recipe(bits=1.58)
    assert (recipe.name, recipe.scheme) == ("ternary", "ternary")
    assert (
        recipe.resolved()
        == resolve_recipe(scheme="ternary").resolved()
        == resolve_recipe("ternary").resolved()
    )
    again = resolve_recipe(
        json.loads(json.dumps(resolve_recipe("ternary", levels=4, fallback=False).resolved()))
    )
    assert (again.levels, again.fallback) == (4, ())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"bits": 1.58, "scheme": "kmeans"}, r"bits is 1\.58, which means ternary, and scheme is kmeans"),
        ({"bits": 4, "scheme": "ternary"}, "bits is 4, but scheme ternary has no bits"),
        ({"levels": 4}, "levels: no rule of this recipe has scheme ternary"),
        ({"bits": 4, "group_size": 64, "hadamard": True}, "group_size, hadamard: no rule"),
        ({"scheme": "ternary", "levels": 2}, "levels is 2; 3 and 4 are allowed"),
        ({"scheme": "ternary", "group_size": 32}, "group_size is 32; 128 and 64 are allowed"),
        (
            {"scheme": "gguf:Q4_L"},
            r"is 'gguf:Q4_L'; allowed: kmeans, additive, ternary, asis, gguf:TYPE .*Q4_K",
        ),
        ({"recipe": {"fallback": ["Q8_0"]}}, "fallback: is 'Q8_0'; allowed: kmeans"),
        (
            {"recipe": {"rules": [{"role": "q", "scheme": "ternary", "bits": 2}]}},
            r"rules\[0\]: bits is 2 .* kmeans",
        ),
        ({"recipe": {"rules": [{"role": "q", "levels": 4}]}}, r"rules\[0\]: levels is 4 for scheme kmeans"),
        ({"recipe": {"rules": [{"role": "q", "keep": True, "levels": 4}]}}, "keep = true cannot go with"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, object], text: str) -> None:
    with pytest.raises(RecipeError, match=text):
        resolve_recipe(**options)  # type: ignore[arg-type]


def test_shipped_recipes_resolve_and_are_described() -> None:
    for name, description in list_recipes().items():
        recipe = load_recipe(name)
        assert description == recipe.description
        assert resolve_recipe(name).name == name


def test_a_scheme_can_be_named_and_restored() -> None:
    for name, build in NAMED.items():
        scheme = build(Options())
        assert scheme_from_spec(json.loads(json.dumps(scheme.spec()))) == scheme
        assert scheme.rate > 0
        assert scheme.label
        if name.startswith("gguf:"):
            assert scheme.label == name


@pytest.mark.parametrize("rule", [{"levels": 4}, {"group_size": 64}, {}])
def test_rules_fill_in_from_the_top_level(rule: dict[str, int]) -> None:
    recipe = resolve_recipe(
        {"scheme": "kmeans", "levels": 3, "rules": [{"role": "q", "scheme": "ternary", **rule}]}
    )
    assert recipe.scheme_of(recipe.rules[0]) == Ternary(rule.get("levels", 3), rule.get("group_size", 128))


def test_straight_gguf_gives_an_untied_head_a_gguf_type(make_model: Callable[..., Path]) -> None:
    plan = plan_of(make_model(**{**WIDE, "hidden_size": 256}), scheme="gguf:Q4_K")
    by_role = {r.role.kind: r.scheme for r in plan.rows}
    assert by_role["head"] == Blocks("Q6_K")
    assert by_role["q"] == Blocks("Q4_K")
    assert isinstance(by_role["embed"], Keep)


def test_rows_that_do_not_fit_fall_back_and_say_so(make_model: Callable[..., Path]) -> None:
    folder = make_model(**ODD)
    plan = plan_of(folder, scheme="ternary")
    down = [r for r in plan.rows if r.role.kind == "down"]
    assert {r.scheme for r in down} == {Ternary(3, 64)}
    assert all("rows of 192 are not whole groups of 128" in r.why for r in down)
    (note,) = [n for n in plan.notes if "rows of 192" in n]
    assert "2 tensors take ternary g64 instead of ternary g128: model.layers.0.mlp.down_proj.weight" in note
    named = plan_of(folder, recipe={"scheme": "ternary", "fallback": ["gguf:Q8_0"]})
    assert {r.scheme for r in named.rows if r.role.kind == "down"} == {Blocks("Q8_0")}
    straight = plan_of(folder, scheme="gguf:Q4_K")  # 128 and 192: no whole block of 256
    assert {r.scheme for r in straight.rows if r.role.kind in ("q", "down")} == {Blocks("Q5_0")}


def test_no_row_is_padded_and_the_last_resort_fits_any(make_model: Callable[..., Path]) -> None:
    plan = plan_of(make_model(), scheme="ternary")  # rows of 64 and 96
    chosen = {r.shape[-1]: r.scheme for r in plan.rows if r.role.kind in ("q", "down")}
    assert chosen == {64: Ternary(3, 64), 96: KMeans(16)}


def test_no_fallback_lists_every_offender_and_what_would_fit(make_model: Callable[..., Path]) -> None:
    folder = make_model(**ODD)
    with pytest.raises(UnsupportedModelError, match="2 tensors do not fit their scheme") as caught:
        plan_of(folder, scheme="ternary", fallback=False)
    for layer in range(2):
        assert f"model.layers.{layer}.mlp.down_proj.weight (ternary g128: rows of 192" in caught.value.message
    assert caught.value.hint is not None
    assert "rows of 192 fit kmeans K=16, additive 4x8, ternary g64, gguf:Q8_0" in caught.value.hint
    assert "gguf:Q4_K" not in caught.value.hint
    assert "gguf:PQ2_0" not in caught.value.hint
    smaller = plan_of(folder, scheme="ternary", group_size=64, fallback=False)
    assert {r.bpw for r in smaller.rows if isinstance(r.scheme, Ternary)} == {2.25}


@pytest.mark.parametrize(
    ("options", "bpw"),
    [
        ({"scheme": "ternary"}, 2.125),
        ({"scheme": "ternary", "levels": 4, "group_size": 64}, 2.25),
        ({"scheme": "gguf:Q4_0"}, 4.5),
    ],
    ids=str,
)
def test_a_job_stores_what_the_search_finds(
    options: dict[str, object], bpw: float, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = make_model(**WIDE)
    report = quantize_model(folder, tmp_path / "out", **options)  # type: ignore[arg-type]
    name = "model.layers.1.mlp.down_proj.weight"
    with Artifact.open(tmp_path / "out") as art, Checkpoint.open(folder) as source:
        assert art.check_sums() == []
        weight = source.load(name).values.astype(np.float32)
        scheme = next(r.scheme for r in report.rows if r.name == name)
        assert art.records[name].scheme == scheme.spec()
        np.testing.assert_array_equal(art[name].dequantize(), scheme.quantize(weight).dequantize())
        exact = weight.astype(np.float64)
        lost = np.square(exact - art[name].dequantize()).sum() / np.square(exact).sum()
        assert report.errors[name] == pytest.approx(lost, rel=1e-6)
        assert art[name].nbits_per_weight == bpw
    with trapetum.load(tmp_path / "out") as model:
        assert np.isfinite(model.logits([1, 2, 3])).all()


def test_importance_moves_the_scales() -> None:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((4, 256)).astype(np.float32)
    h = np.exp(rng.standard_normal(256)).astype(np.float32)
    plain, weighted = (Ternary().quantize(weight, i).dequantize().astype(np.float64) for i in (None, h))
    assert (h * (weight - weighted) ** 2).sum() < (h * (weight - plain) ** 2).sum()


def test_1_58_bits_say_what_they_cost(make_model: Callable[..., Path], tmp_path: Path) -> None:
    notes = Notes()
    quantize_model(make_model(**WIDE), tmp_path / "out", bits=1.58, progress=notes)
    (cost,) = [n for n in notes.notes if "relative squared error" in n]
    assert "ternary g128" in cost
    assert "4 bits with 0.00" in cost
    assert "much worse" in cost

    def ternary(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
        return rng.integers(-1, 2, (rows, columns)) * 0.25

    report = quantize_model(
        make_model(fill=ternary, name="trits", **WIDE), tmp_path / "dry", bits=1.58, dry_run=True
    )
    assert any("nothing is lost" in n for n in report.notes)
    # A GGUF type for ternary models, on a model that is none: files of that kind only babble.
    blocks = quantize_model(tmp_path / "model", tmp_path / "dry", scheme="gguf:PTQ1_0", dry_run=True)
    assert any(
        "gguf:PTQ1_0 keeps these weights with a relative squared error of 0.1" in n for n in blocks.notes
    )
    four_bits = quantize_model(make_model(name="plain", **WIDE), tmp_path / "dry", dry_run=True)
    assert not any("sample" in n for n in four_bits.notes)


def test_a_weight_beyond_float16_is_refused_before_any_work(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    huge = np.full((128, 128), 1e5, ml_dtypes.bfloat16)
    folder = make_model(change={name: huge}, **WIDE)
    for scheme in ("ternary", "gguf:Q4_0"):
        with pytest.raises(CheckpointError, match=rf"{name} holds a weight of magnitude 99840.*float16"):
            quantize_model(folder, tmp_path / "out", scheme=scheme)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e38])
@pytest.mark.parametrize("scheme", ["ternary", "gguf:PTQ1_0"])
def test_the_sample_of_the_cost_leaves_bad_weights_to_the_survey(
    make_model: Callable[..., Path], tmp_path: Path, value: float, scheme: str
) -> None:
    def bad(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
        values = rng.standard_normal((rows, columns))
        values[0, 0] = value
        return values

    with pytest.raises(CheckpointError, match=r"only finite weights|holds a weight of magnitude"):
        quantize_model(make_model(fill=bad, **WIDE), tmp_path / "out", scheme=scheme, dry_run=True)


def test_ternary_matches_the_llama_writer_on_its_own_output(make_model: Callable[..., Path]) -> None:
    """A third party's absmax writer keeps codes that are exact already, so ours must be what it would write."""
    rng = np.random.default_rng(3)
    scales = (rng.random((2, 2)) + 0.5).astype(np.float16)
    trits = rng.integers(-1, 2, (2, 256))
    trits[:, ::128] = 1  # every group has its full magnitude
    values = (trits.reshape(2, 2, 128) * scales[:, :, None]).reshape(2, 256).astype(np.float32)
    codes, found = fit_groups(values, 128, 3)
    np.testing.assert_array_equal(found, scales)
    np.testing.assert_array_equal(codes, trits + 1)
    d = np.abs(values.reshape(4, 128)).max(axis=1)  # the rule of the container's reference writer
    blocks = BLOCK_TYPES["PQ2_0"].from_parts({"d": d.astype(np.float16), "codes": codes.reshape(4, 128)})
    np.testing.assert_array_equal(BLOCK_TYPES["PQ2_0"].decode(blocks).reshape(2, 256), values)


# ---------------------------------------------------------------------------- Hadamard
def test_rotation_is_recorded_undone_and_deterministic(
    make_model: Callable[..., Path], tmp_path: Path, identity: Callable[[Path], dict[str, bytes]]
) -> None:
    folder = make_model(**WIDE)
    quantize_model(folder, tmp_path / "a", scheme="ternary", hadamard=True, threads=1)
    quantize_model(folder, tmp_path / "b", scheme="ternary", hadamard=True, threads=2)
    assert identity(tmp_path / "a") == identity(tmp_path / "b")
    other = quantize_model(folder, tmp_path / "c", scheme="ternary", hadamard=True, seed=1)
    name = "model.layers.0.mlp.down_proj.weight"
    with (
        Artifact.open(tmp_path / "a") as art,
        Artifact.open(tmp_path / "c") as seeded,
        Checkpoint.open(folder) as source,
    ):
        assert art.rotation is not None
        assert art.rotation_of("lm_head.weight") is None
        assert art.rotation.block_size == 128
        assert sorted(art.rotation.signs) == [128, 256]
        assert art.manifest["rotation"] != seeded.manifest["rotation"]
        assert art.records[name].params == {"levels": 3, "group_size": 128, "rotation": "hadamard"}
        weight = source.load(name).values.astype(np.float64)
        error = np.square(weight - decoded(art, name)).sum() / np.square(weight).sum()
        assert error == pytest.approx(art.records[name].relative_error, rel=1e-5)
        assert np.square(weight - art[name].dequantize()).sum() > np.square(weight).sum()  # stored rotated
        np.testing.assert_array_equal(decoded(art, name, slice(3, 5)), decoded(art, name)[3:5])
    assert "hadamard: block 128, 14 tensors rotated" in other.notes


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}, "architecture qwen2 run nowhere"),
        (
            {"hidden_size": 64, "intermediate_size": 192},
            "no ternary tensor of this plan has rows of a multiple of 128",
        ),
    ],
)
def test_rotations_that_nobody_undoes_are_refused(
    config: dict[str, object], text: str, make_model: Callable[..., Path]
) -> None:
    biases = {
        f"model.layers.{i}.self_attn.{p}_proj.bias": np.zeros(n, ml_dtypes.bfloat16)
        for i in range(2)
        for p, n in (("q", 128), ("k", 64), ("v", 64))
    }
    base = {**WIDE, "num_key_value_heads": 2, **config}
    if base["hidden_size"] == 64:
        base |= {"head_dim": 16}
    with pytest.raises((UnsupportedModelError, RecipeError), match=text):
        plan_of(
            make_model(change=biases if "model_type" in config else {}, **base),
            scheme="ternary",
            hadamard=True,
        )


def test_rows_without_a_whole_block_stay_unrotated(make_model: Callable[..., Path]) -> None:
    plan = plan_of(make_model(**ODD), scheme="ternary", hadamard=True)
    assert {r.role.kind: r.rotated for r in plan.rows if r.role.kind in ("q", "down")} == {
        "q": True,
        "down": False,
    }
    assert any("not rotated" in n and "down_proj" in n for n in plan.notes)
