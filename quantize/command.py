"""The command that makes an artifact again: options that resolve to the very recipe, or the recipe itself."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from trapetum.errors import RecipeError
from trapetum.quantize.recipe import Recipe, list_recipes, resolve_recipe

__all__ = ["DEFAULT_SHARD", "manifest_command", "quantize_command"]

DEFAULT_SHARD = 5_000_000_000

_OPTIONS = ("scheme", "bits", "effort", "levels", "group_size", "seed")


def quantize_command(
    recipe: Recipe,
    source: Mapping[str, Any],
    max_shard_size: int = DEFAULT_SHARD,
    calibration: Mapping[str, Any] | None = None,
) -> str:
    """One line for a shell.

    Parameters
    ----------
    recipe : Recipe
        Resolved.
    source : mapping
        What the manifest says of the source.
    max_shard_size : int
        In bytes.
    calibration : mapping, optional
        What the manifest says of it: the name of a text with ``tokens``, or of an importance file.

    Examples
    --------
    >>> quantize_command(resolve_recipe(bits=3, effort="high"), {"name": "m"})
    'trapetum quantize m --recipe 3bit --effort high'
    """
    words = ["trapetum", "quantize", str(source.get("repo", source.get("name", "MODEL")))]
    if "commit" in source:
        words += ["--revision", str(source["commit"])]
    words += _recipe_words(recipe)
    if calibration is not None and "tokens" in calibration:
        words += ["--calibrate", str(calibration["file"]), "--calib-tokens", str(calibration["tokens"])]
    elif calibration is not None:
        words += ["--imatrix", str(calibration["file"])]
    if max_shard_size != DEFAULT_SHARD:
        words += ["--max-shard-size", str(max_shard_size)]
    return shlex.join(words)


def manifest_command(manifest: Mapping[str, Any], base_model: str | None = None) -> str:
    """The command of a finished artifact.

    Parameters
    ----------
    manifest : mapping
        Content of ``trapetum.json``; one of another version of the tool, or damaged, gives a command without options.
    base_model : str, optional
        Hub id of the source, where it is not in the manifest.
    """
    source = {**manifest["source"], **({} if base_model is None else {"repo": base_model})}
    try:
        recipe = resolve_recipe(manifest["recipe"])
        return quantize_command(recipe, source, calibration=manifest.get("calibration"))
    except (RecipeError, KeyError, TypeError, ValueError):
        return "trapetum quantize MODEL --recipe recipe.json"


def _recipe_words(recipe: Recipe) -> list[str]:
    """Options that mean this recipe; ``--recipe recipe.json`` where none do."""
    starts: list[dict[str, Any]] = [
        {"scheme": recipe.scheme},
        {"bits": recipe.bits},
        {"scheme": recipe.scheme, "bits": recipe.bits},
    ]
    if recipe.name in list_recipes():
        starts.insert(0, {"recipe": recipe.name})
    for start in starts:
        options = {k: v for k, v in start.items() if v is not None}
        try:
            before = resolve_recipe(**options)
            options |= {k: getattr(recipe, k) for k in _OPTIONS if getattr(recipe, k) != getattr(before, k)}
            if recipe.hadamard and not before.hadamard:
                options["hadamard"] = True
            if recipe.fallback == () != before.fallback:
                options["fallback"] = False
            if resolve_recipe(**options).resolved() == recipe.resolved():
                return _words(options)
        except RecipeError:
            continue
    return ["--recipe", "recipe.json"]


def _words(options: Mapping[str, Any]) -> list[str]:
    words = []
    for key, value in options.items():
        if key == "fallback":
            words.append("--no-fallback")
        elif value is True:
            words.append(f"--{key}")
        else:
            words += [f"--{key.replace('_', '-')}", str(value)]
    return words
