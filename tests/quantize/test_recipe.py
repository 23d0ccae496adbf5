"""Recipes: first match wins, every fault carries its path, resolving is idempotent, presets say what they do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trapetum.errors import RecipeError
from trapetum.quantize.additive import Additive
from trapetum.quantize.recipe import Recipe, list_recipes, load_recipe, resolve_recipe
from trapetum.quantize.rules import DEFAULT_RULES, ROLES
from trapetum.quantize.schemes import Keep, KMeans

Q0 = ("model.layers.0.self_attn.q_proj.weight", "q", 0)


def scheme(recipe: Recipe, name: str, kind: str, layer: int | None = None, expert: bool = False) -> object:
    index = recipe.find(name, kind, layer, expert)
    assert index is not None
    return recipe.scheme_of(recipe.rules[index])


def test_every_role_has_a_default() -> None:
    recipe = resolve_recipe(bits=4)
    found = {kind: scheme(recipe, "x", kind) for kind in (*ROLES, "linear")}
    kept = {k for k, s in found.items() if s == Keep()}
    assert kept == {"norm", "bias", "router", "vector", "buffer", "other", "embed"}
    assert found["head"] == KMeans(256)
    assert {s for k, s in found.items() if k not in kept | {"head"}} == {KMeans(16)}


@pytest.mark.parametrize(("bits", "size"), [(3, 8), (4, 16), (5, 32), (6, 64), (8, 256)])
def test_bits_are_codebook_sizes(bits: int, size: int) -> None:
    recipe = resolve_recipe(bits=bits, effort="fast")
    assert scheme(recipe, *Q0) == KMeans(size, "fast")
    assert scheme(recipe, "lm_head.weight", "head") == KMeans(256, "fast")


@pytest.mark.parametrize("name", ["3bit", "4bit", "4bit-head8", "8bit"])
def test_presets(name: str) -> None:
    assert name in list_recipes()
    recipe = resolve_recipe(name)
    bits = int(name[0])
    assert recipe.name == name
    assert scheme(recipe, *Q0) == KMeans(1 << bits)
    assert scheme(recipe, "lm_head.weight", "head") == KMeans(16 if name == "4bit" else 256)


def test_four_bits_is_its_preset() -> None:
    assert (
        resolve_recipe(bits=4).resolved()
        == resolve_recipe("4bit-head8").resolved()
        == resolve_recipe().resolved()
    )


def test_first_match_wins_and_layers_narrow() -> None:
    recipe = resolve_recipe(
        {
            "bits": 3,
            "rules": [
                {"glob": "*.q_proj.weight", "layers": "0,2-3", "bits": 8},
                {"regex": r"model\.layers\.\d\.self_attn\.q_proj\.weight", "keep": True},
                {"role": ["attention"], "bits": 5},
                {"role": "experts", "bits": 2, "effort": "high"},
            ],
        }
    )
    assert [scheme(recipe, f"model.layers.{i}.self_attn.q_proj.weight", "q", i) for i in range(5)] == [
        KMeans(256), Keep(), KMeans(256), KMeans(256), Keep(),
    ]  # fmt: skip
    assert scheme(recipe, "model.layers.12.self_attn.q_proj.weight", "q", 12) == KMeans(32)
    assert scheme(recipe, "x", "up", 1, True) == KMeans(4, "high")
    assert scheme(recipe, "x", "up", 1, False) == KMeans(8)


def test_resolving_is_idempotent_and_survives_json() -> None:
    recipe = resolve_recipe({"rules": [{"role": "head", "bits": 4}]}, bits=3, seed=5, effort="high")
    assert recipe.rules[-len(DEFAULT_RULES) :] == DEFAULT_RULES
    again = resolve_recipe(json.loads(json.dumps(recipe.resolved())))
    assert again.resolved() == recipe.resolved()
    assert resolve_recipe(recipe) == recipe


def test_a_file_and_its_stored_form_load(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('bits = 6\n[[rules]]\nrole = "embed"\nbits = 8\n')
    recipe = resolve_recipe(path)
    assert (recipe.name, recipe.bits) == ("mine", 6)
    stored = tmp_path / "stored.json"
    stored.write_text(json.dumps(recipe.resolved()))
    assert resolve_recipe(stored).resolved() == recipe.resolved()
    path.write_text("bits = \n")
    with pytest.raises(RecipeError, match=r"mine\.toml: not a valid recipe"):
        load_recipe(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(RecipeError, match="UTF-8"):
        load_recipe(path)
    with pytest.raises(RecipeError, match="neither a file nor one of: 2bit"):
        load_recipe(tmp_path / "absent.toml")


RULE = {"role": "q"}


@pytest.mark.parametrize(
    ("recipe", "text"),
    [
        ({"bitz": 3}, r"^bitz: unknown key; allowed here: name, description, scheme, bits"),
        ({"rules": [RULE, RULE, {"role": "v", "bitz": 3}]}, r"^rules\[2\]\.bitz: unknown key; allowed here: glob"),
        ({"rules": [{"role": ["q", "z"]}]}, r"^rules\[0\]\.role\[1\]: 'z' is not allowed; allowed: embed, q"),
        ({"rules": [{"role": "q", "effort": "max"}]}, r"rules\[0\]\.effort: 'max' .* allowed: fast, default, high"),
        ({"rules": [{"role": "q", "scheme": "gptq"}]}, r"rules\[0\]\.scheme: is 'gptq'; allowed: kmeans"),
        ({"rules": [{"role": "q", "bits": 7}]}, r"rules\[0\]: bits is 7 .* allowed: 2, 3, 4, 5, 6, 8"),
        ({"rules": [{"role": "q", "bits": "4"}]}, r"rules\[0\]\.bits: .*integer; found '4'"),
        ({"rules": [{"role": "q", "bits": True}]}, r"rules\[0\]\.bits: .*integer; found True"),
        ({"rules": [{"bits": 4}]}, r"rules\[0\]: needs exactly one of glob, regex, role; found none"),
        ({"rules": [{"role": "q", "glob": "*"}]}, r"exactly one of glob, regex, role; found glob, role"),
        ({"rules": [{"role": "q", "keep": True, "bits": 4}]}, r"keep = true cannot go with"),
        ({"rules": [{"regex": "("}]}, r"rules\[0\]\.regex: is not a regular expression"),
        ({"rules": [{"role": "q", "layers": "3-"}]}, r"rules\[0\]\.layers: must be block numbers"),
        ({"rules": "all"}, r"^rules: .*found 'all'"),
        ({"bits": 9}, r"recipe: bits is 9"),
        ({"effort": "x"}, r"^effort: 'x' is not allowed; allowed: fast, default, high"),
        ({"seed": -1}, r"^seed: .*found -1"),
    ],
)  # fmt: skip
def test_faults_carry_their_path(recipe: dict[str, object], text: str) -> None:
    with pytest.raises(RecipeError, match=text):
        resolve_recipe(recipe)


def test_a_near_miss_is_suggested() -> None:
    with pytest.raises(RecipeError) as caught:
        resolve_recipe({"rules": [{"role": "q", "bitz": 3}]})
    assert caught.value.hint == "Did you mean 'bits'?"


@pytest.mark.parametrize("bits", [0, 1, 7, 9, 16, -4])
def test_other_widths_are_refused_with_the_list(bits: float) -> None:
    with pytest.raises(RecipeError, match="allowed: 2, 3, 4, 5, 6, 8"):
        resolve_recipe(bits=bits)


def test_two_bits_are_additive_unless_a_scheme_is_named() -> None:
    assert scheme(resolve_recipe(bits=2), *Q0) == Additive(2)
    assert resolve_recipe(bits=2).name == resolve_recipe(scheme="additive").name == "2bit"
    assert scheme(resolve_recipe(bits=2, scheme="kmeans"), *Q0) == KMeans(4)
    assert scheme(resolve_recipe(bits=3, scheme="additive", effort="fast"), *Q0) == Additive(3, "fast")
    with pytest.raises(RecipeError, match="bits is 5; allowed: 1, 2, 3, 4"):
        resolve_recipe(bits=5, scheme="additive")
