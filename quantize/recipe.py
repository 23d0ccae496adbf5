"""Recipes: an ordered list of rules that gives every tensor a scheme, written in TOML.

::

    name = "mine"
    description = "4 bits, the first and last blocks and the head at 8"
    bits = 4                        # what a rule without bits means
    scheme = "kmeans"
    effort = "default"              # fast | default | high
    levels = 3                      # of scheme ternary: 3 | 4
    group_size = 128                # of scheme ternary: 128 | 64
    hadamard = false                # fold a rotation into ternary weights
    rotate = "residual"             # optional: the whole model in another basis first (models.residual)
    target_bpw = 4.0                # optional: a budget; rules without bits and scheme are then open (quantize.budget)
    candidates = ["kmeans"]         # optional: schemes that open tensors may take
    tie = ["gate_up", "experts"]    # what of a layer takes one scheme under a budget; also "qkv"
    fallback = ["gguf:Q8_0"]        # optional: what rows that do not fit a scheme take; [] refuses them
    seed = 0

    [[rules]]                       # first match wins
    role = ["attention", "mlp"]     # a role, a group of roles, or a list of them
    layers = "0,30-31"              # optional; block numbers
    bits = 8

    [[rules]]
    glob = "model.layers.*.mlp.down_proj.weight"    # or: regex = "..." (must match the whole name)
    keep = true

After a recipe's own rules come :data:`DEFAULT_RULES`: norms, biases, routers, embeddings, buffers and unknown tensors
are kept, an untied head takes 8 bits, every other linear layer takes the recipe's ``bits``. The *resolved* recipe
spells everything out (flags merged in, default rules appended); it is what the artifact stores and what a resumed job
compares. Resolving a resolved recipe changes nothing.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Sequence
from dataclasses import fields
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from trapetum.errors import RecipeError
from trapetum.quantize.additive import Additive
from trapetum.quantize.block_scheme import PREFIX
from trapetum.quantize.rules import DEFAULT_RULES, Kind, Rule
from trapetum.quantize.scheme import Effort
from trapetum.quantize.schemes import (
    BITS,
    NAMED,
    Keep,
    Options,
    Scheme,
    check_scheme_name,
)
from trapetum.quantize.ternary import Ternary
from trapetum.quantize.ternary_intake import AsIs

__all__ = [
    "ADDITIVE_BELOW",
    "ADDITIVE_BITS",
    "TERNARY_BITS",
    "Recipe",
    "list_recipes",
    "load_recipe",
    "resolve_recipe",
]

Rotate = Literal["residual"]
Tie = Literal["qkv", "gate_up", "experts"]

TERNARY_BITS = 1.58
"""What ``bits`` calls ternary weights: log2(3), to two places."""

ADDITIVE_BELOW = 3.5
"""Budgets below this many bits a weight consider additive codebooks, too."""

ADDITIVE_BITS = 2
"""The ``bits`` of a call that mean additive codebooks where no scheme is named."""


class Recipe(BaseModel):
    """A recipe; see the module's page for the meaning of each key."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str = "custom"
    description: str = ""
    scheme: str = "kmeans"
    bits: int = 4
    effort: Effort = "default"
    levels: int = 3
    group_size: int = 128
    hadamard: bool = False
    rotate: Rotate | None = None
    target_bpw: float | None = Field(default=None, gt=0, le=16, strict=False)
    candidates: tuple[str, ...] | None = Field(default=None, min_length=1, strict=False)
    tie: tuple[Tie, ...] = Field(default=("gate_up", "experts"), strict=False)
    fallback: tuple[str, ...] | None = Field(default=None, strict=False)
    seed: int = Field(default=0, ge=0)
    rules: tuple[Rule, ...] = Field(default=(), strict=False)

    @field_validator("scheme")
    @classmethod
    def _scheme(cls, value: str) -> str:
        return check_scheme_name(value)

    @field_validator("candidates")
    @classmethod
    def _candidates(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if value is not None and AsIs.name in value:
            raise ValueError(f"{AsIs.name} is found in the weights, not chosen")
        return value if value is None else tuple(check_scheme_name(v) for v in value)

    @field_validator("fallback")
    @classmethod
    def _fallback(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        return value if value is None else tuple(check_scheme_name(v) for v in value)

    def scheme_of(self, rule: Rule) -> Scheme:
        """The scheme that ``rule`` gives, with this recipe's defaults filled in."""
        if rule.keep:
            return Keep()
        name = rule.scheme or self.scheme
        for option, takers in (("bits", BITS), ("levels", (Ternary.name,)), ("group_size", (Ternary.name,))):
            if getattr(rule, option) is not None and name not in takers:
                raise RecipeError(
                    f"{option} is {getattr(rule, option)} for scheme {name}; it goes with: {', '.join(takers)}"
                )
        return NAMED[name](self._options(rule))

    def _options(self, rule: Rule | None = None) -> Options:
        keys = [f.name for f in fields(Options)]
        own = {} if rule is None else {k: v for k in keys if (v := getattr(rule, k)) is not None}
        return Options(**{k: getattr(self, k) for k in keys} | own)

    def fallbacks_of(self, scheme: Scheme) -> tuple[Scheme, ...]:
        """What a tensor takes, first fit first, whose rows do not fit ``scheme``; empty where it is to be refused."""
        if self.fallback is None:
            return scheme.fallbacks()
        return tuple(NAMED[name](self._options()) for name in self.fallback)

    def find(self, name: str, kind: str, layer: int | None = None, expert: bool = False) -> int | None:
        """Index of the first rule that selects a tensor, or None."""
        hits = (i for i, r in enumerate(self.rules) if r.matches(name, kind, layer, expert))
        return next(hits, None)

    def resolved(self) -> dict[str, Any]:
        """The recipe as JSON values with nothing left implicit but what a rule leaves to the top level."""
        return {
            "name": self.name,
            "scheme": self.scheme,
            "bits": self.bits,
            "effort": self.effort,
            "levels": self.levels,
            "group_size": self.group_size,
            "hadamard": self.hadamard,
            "fallback": None if self.fallback is None else list(self.fallback),
            "seed": self.seed,
            **({} if self.rotate is None else {"rotate": self.rotate}),
            **({} if self.target_bpw is None else self._budget()),
            "rules": [r.model_dump(exclude_defaults=True) for r in self.rules],
        }

    def _budget(self) -> dict[str, Any]:
        return {
            "target_bpw": self.target_bpw,
            "candidates": None if self.candidates is None else list(self.candidates),
            "tie": list(self.tie),
        }

    def to_toml(self) -> str:
        """A file that :func:`load_recipe` reads as this recipe."""
        found = {**self.resolved(), "description": self.description}
        rules = found.pop("rules")
        lines = [
            f"{k} = {json.dumps(v, ensure_ascii=False)}"
            for k, v in found.items()
            if v is not None and v != ""
        ]
        for rule in rules:
            lines += [
                "",
                "[[rules]]",
                *(f"{k} = {json.dumps(v, ensure_ascii=False)}" for k, v in rule.items()),
            ]
        return "\n".join(lines) + "\n"


def list_recipes() -> dict[str, str]:
    """The shipped recipes: name -> one line of description, in alphabetical order."""
    found = {}
    for entry in sorted(files("trapetum.recipes").iterdir(), key=lambda e: e.name):
        if entry.name.endswith(".toml"):
            found[entry.name.removesuffix(".toml")] = tomllib.loads(entry.read_text("utf-8"))["description"]
    return found


def load_recipe(name_or_path: str | Path) -> Recipe:
    """Read a shipped recipe by name, or a TOML file (or the JSON of a resolved recipe) by path.

    Raises
    ------
    RecipeError
        If there is no such recipe, or it has a wrong key or value; the message carries the key's path.
    """
    shipped = list_recipes()
    if str(name_or_path) in shipped:
        text, origin = files("trapetum.recipes").joinpath(f"{name_or_path}.toml").read_text("utf-8"), ""
    else:
        path = Path(name_or_path)
        if not path.is_file():
            raise RecipeError(
                f"recipe {str(name_or_path)!r} is neither a file nor one of: {', '.join(shipped)}",
                hint="`trapetum recipes` lists the shipped recipes.",
            )
        origin = f"{path}: "
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise RecipeError(f"{path}: cannot be read as UTF-8 text ({e})") from e
    try:
        data = json.loads(text) if str(name_or_path).endswith(".json") else tomllib.loads(text)
    except (tomllib.TOMLDecodeError, json.JSONDecodeError) as e:
        raise RecipeError(f"{origin}not a valid recipe file: {e}") from e
    return _validated(data, origin, default_name=Path(name_or_path).stem)


def resolve_recipe(
    recipe: str | Path | Recipe | dict[str, Any] | None = None,
    *,
    bits: float | None = None,
    scheme: str | None = None,
    effort: str = "default",
    seed: int = 0,
    levels: int | None = None,
    group_size: int | None = None,
    hadamard: bool = False,
    fallback: bool = True,
    target_bpw: float | None = None,
    candidates: Sequence[str] | None = None,
    rotate: str | None = None,
) -> Recipe:
    """Merge a recipe with the options of a call and append the default rules.

    Parameters
    ----------
    recipe : str, Path, Recipe or dict, optional
        A shipped name, a file, or the content; without one, the shipped recipe for ``scheme`` or ``bits`` is taken.
    bits : float, optional
        Replaces the recipe's top-level ``bits``; 4 when there is no recipe either (2 for scheme additive). 1.58 means
        scheme ternary, 2 without a scheme means additive, and another fraction is a ``target_bpw``.
    scheme, effort, seed, levels, group_size, hadamard, rotate
        Replace the recipe's; ``"default"``, 0, None and False leave them as they are.
    fallback : bool
        False refuses tensors that do not fit their scheme, whatever the recipe says.
    target_bpw : float, optional
        Stored bits a weight over all quantized tensors, see ``quantize.budget``; excludes ``bits``.
    candidates : sequence of str, optional
        Schemes that the budget may choose; the one of ``scheme`` where that is given.

    Raises
    ------
    RecipeError
        If an option or the recipe is wrong, or asks for what is not available.
    """
    if bits == TERNARY_BITS and scheme not in (None, Ternary.name):
        raise RecipeError(
            f"bits is {bits}, which means ternary, and scheme is {scheme}",
            hint="Leave one of them out, or give the size as --target-bpw.",
        )
    if bits == TERNARY_BITS and scheme in (None, Ternary.name):
        bits, scheme = None, Ternary.name
    if bits == ADDITIVE_BITS and scheme is None:
        scheme = Additive.name
    if isinstance(bits, float) and not bits.is_integer() and scheme in (None, *BITS):
        if target_bpw is not None:
            raise RecipeError(f"bits {bits:g} and target_bpw {target_bpw:g} exclude each other")
        bits, target_bpw = None, bits
    if target_bpw is not None:
        candidates = _check_budget(bits, scheme, candidates)
    width = None if bits is None else _whole_bits(bits, scheme)
    if recipe is None:
        recipe = _default_recipe(scheme, width)
        if target_bpw is not None:
            recipe = Recipe(name=f"{target_bpw:g}bpw")
    if isinstance(recipe, dict):
        recipe = _validated(recipe, "", default_name="custom")
    base = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    if target_bpw is None and base.target_bpw is not None:
        candidates = _check_budget(bits, scheme, candidates)
    wanted = {
        "bits": width,
        "scheme": scheme,
        "levels": levels,
        "group_size": group_size,
        "seed": seed or None,
        "target_bpw": target_bpw,
        "rotate": rotate,
        "candidates": None if candidates is None else tuple(candidates),
    }
    changes: dict[str, Any] = {k: v for k, v in wanted.items() if v is not None}
    if effort != "default":
        changes["effort"] = effort
    if hadamard:
        changes["hadamard"] = True
    if not fallback:
        changes["fallback"] = ()
    rules = base.rules
    if rules[-len(DEFAULT_RULES) :] != DEFAULT_RULES:
        rules = (*rules, *DEFAULT_RULES)
    merged = {**base.model_dump(exclude={"rules"}), **changes}
    result = _validated({**merged, "rules": [r.model_dump() for r in rules]}, "", default_name=base.name)
    schemes = []
    for i, rule in enumerate(result.rules):
        try:
            schemes.append(result.scheme_of(rule))
        except RecipeError as e:
            where = f"rules[{i}]" if i < len(base.rules) else "recipe"
            raise RecipeError(f"{where}: {e.message}", hint=e.hint) from e
    if result.candidates is not None and result.target_bpw is None:
        raise RecipeError(
            "candidates are what a budget chooses from, and there is no target_bpw",
            hint="Give --target-bpw, or leave the candidates out.",
        )
    if result.hadamard and result.rotate:
        raise RecipeError("hadamard and rotate exclude each other: a layer would be turned twice")
    _check_ternary_options(levels, group_size, result.hadamard, schemes)
    return result


def _check_budget(
    bits: float | None, scheme: str | None, candidates: Sequence[str] | None
) -> Sequence[str] | None:
    """The candidates that a call with a budget means."""
    if bits is not None:
        raise RecipeError(
            "bits and target_bpw exclude each other: a budget chooses the bits of each tensor",
            hint="Give one of them; rules of a recipe may fix the bits of single tensors.",
        )
    if scheme is not None and scheme not in BITS and candidates is None:
        raise RecipeError(
            f"target_bpw with scheme {scheme}: one scheme leaves nothing to choose",
            hint=f"Use {' or '.join(BITS)}, or name several candidates.",
        )
    return (scheme,) if candidates is None and scheme is not None else candidates


def _default_recipe(scheme: str | None, bits: int | None) -> Recipe | str:
    """What is meant without a recipe: the shipped one of that name, else the scheme or width with the default rules."""
    shipped = list_recipes()
    if scheme is not None and scheme not in BITS:
        name = scheme.replace(":", "-")
        # A head that is not tied takes the type that llama.cpp gives it.
        rules = [{"role": "head", "scheme": "gguf:Q6_K"}] if scheme.startswith(PREFIX) else []
        return (
            name if name in shipped else _validated({"scheme": scheme, "rules": rules}, "", default_name=name)
        )
    if scheme == Additive.name:
        wanted = ADDITIVE_BITS if bits is None else bits
        name = "2bit" if wanted == ADDITIVE_BITS else f"additive-{wanted}bit"
        return name if name in shipped else Recipe(name=name, scheme=scheme, bits=wanted)
    wanted = 4 if bits is None else bits
    named = "4bit-head8" if wanted == 4 else f"{wanted}bit"
    return named if named in shipped and wanted != ADDITIVE_BITS else Recipe(name=named, bits=wanted)


def _check_ternary_options(
    levels: int | None, group_size: int | None, hadamard: bool, schemes: Sequence[Scheme]
) -> None:
    """Options that would do nothing are refused: they were meant for another scheme."""
    given = {"levels": levels is not None, "group_size": group_size is not None, "hadamard": hadamard}
    idle = [name for name, is_given in given.items() if is_given]
    if idle and not any(isinstance(s, Ternary) for s in schemes):
        raise RecipeError(
            f"{', '.join(idle)}: no rule of this recipe has scheme ternary, which alone takes it",
            hint="Use --scheme ternary, or leave the option out.",
        )


def _whole_bits(bits: float, scheme: str | None) -> int:
    """The whole number of bits, or the reason why there is none."""
    if isinstance(bits, bool) or not isinstance(bits, int | float):
        raise RecipeError(f"bits is {bits!r}; a number is needed")
    if scheme is not None and scheme not in BITS:
        if scheme not in NAMED:
            raise RecipeError(f"scheme is {scheme!r}; available: {', '.join(NAMED)}")
        raise RecipeError(
            f"bits is {bits:g}, but scheme {scheme} has no bits to choose", hint="Leave --bits out."
        )
    widths = BITS[scheme or "kmeans"]
    if bits not in widths:
        raise RecipeError(f"bits is {bits:g}; allowed: {', '.join(map(str, widths))}")
    return int(bits)


def _validated(data: dict[str, Any], origin: str, default_name: str) -> Recipe:
    """Validate; the first fault becomes one sentence with the path of its key."""
    try:
        return Recipe.model_validate({"name": default_name, **data})
    except ValidationError as e:
        fault = e.errors(include_url=False)[0]
        raise _fault(
            origin, fault["loc"], fault["type"], fault["msg"], fault["input"], fault.get("ctx")
        ) from None


def _fault(
    origin: str, loc: Sequence[str | int], kind: str, message: str, found: Any, ctx: dict[str, Any] | None
) -> RecipeError:
    path = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in loc).lstrip(".") or "recipe"
    if kind == "extra_forbidden":
        allowed = list((Rule if len(loc) > 1 else Recipe).model_fields)
        near = difflib.get_close_matches(str(loc[-1]), allowed, n=1)
        return RecipeError(
            f"{origin}{path}: unknown key; allowed here: {', '.join(allowed)}",
            hint=f"Did you mean {near[0]!r}?" if near else None,
        )
    if kind == "literal_error":
        words = {"role": Kind, "tie": Tie, "rotate": Rotate}
        allowed = list(get_args(next((v for k, v in words.items() if k in loc), Effort)))
        return RecipeError(f"{origin}{path}: {found!r} is not allowed; allowed: {', '.join(allowed)}")
    text = str((ctx or {}).get("error", message))
    if kind != "value_error":
        text = f"{text[0].lower()}{text[1:]}; found {found!r}"
    return RecipeError(f"{origin}{path}: {text}")
