"""The command that a card shows resolves to the recipe that was used."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from trapetum.cli.options import parse_bits
from trapetum.quantize.command import quantize_command
from trapetum.quantize.recipe import resolve_recipe

SOURCE = {"repo": "org/name", "commit": "c" * 40, "name": "name"}
PARSERS = {"bits": parse_bits, "levels": int, "group_size": int, "seed": int}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bits": 5, "effort": "high", "seed": 3},
        {"bits": 1.58},
        {"scheme": "ternary", "levels": 4, "group_size": 64},
        {"scheme": "ternary", "hadamard": True},
        {"scheme": "gguf:Q4_K", "fallback": False},
        {"recipe": "4bit", "bits": 6},
        {"scheme": "kmeans", "bits": 2},
    ],
    ids=str,
)
def test_it_resolves_to_the_same_recipe(options: dict[str, Any]) -> None:
    recipe = resolve_recipe(**options)
    words = shlex.split(quantize_command(recipe, SOURCE))
    assert words[:5] == ["trapetum", "quantize", "org/name", "--revision", "c" * 40]
    parsed: dict[str, Any] = {}
    rest = iter(words[5:])
    for word in rest:
        key = word.removeprefix("--").replace("-", "_")
        if key == "hadamard":
            parsed[key] = True
        elif key == "no_fallback":
            parsed["fallback"] = False
        else:
            text = next(rest)
            parsed[key] = PARSERS[key](text) if key in PARSERS else text
    assert "recipe.json" not in words
    assert resolve_recipe(**parsed).resolved() == recipe.resolved()


def test_rules_of_ones_own_need_their_file() -> None:
    recipe = resolve_recipe({"bits": 4, "rules": [{"role": "attention", "bits": 8}]})
    command = quantize_command(recipe, {"name": "my model"}, max_shard_size=10**9)
    assert command == "trapetum quantize 'my model' --recipe recipe.json --max-shard-size 1000000000"


def test_calibration_is_named() -> None:
    recipe = resolve_recipe(bits=3)
    text = quantize_command(
        recipe, {"name": "m"}, calibration={"file": "a.txt", "sha256": "0", "tokens": 512}
    )
    assert text == "trapetum quantize m --recipe 3bit --calibrate a.txt --calib-tokens 512"
    file = quantize_command(recipe, {"name": "m"}, calibration={"file": "m.gguf", "sha256": "0"})
    assert file == "trapetum quantize m --recipe 3bit --imatrix m.gguf"
