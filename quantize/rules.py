"""Rules: which tensors of a model a recipe means, and what happens to them."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from trapetum.quantize.scheme import Effort
from trapetum.quantize.schemes import check_scheme_name

__all__ = ["DEFAULT_RULES", "GROUPS", "ROLES", "Kind", "Rule"]

Kind = Literal[
    "embed", "q", "k", "v", "o", "qkv", "kv", "gate", "up", "down", "gate_up", "head", "norm", "bias", "router",
    "vector", "buffer", "other", "attention", "mlp", "experts", "linear",
]  # fmt: skip

# A group stands for several roles; "experts" also asks that the tensor belongs to routed experts.
_ATTENTION = ("q", "k", "v", "o", "qkv", "kv")
_MLP = ("gate", "up", "down", "gate_up")
GROUPS: dict[str, tuple[str, ...]] = {
    "attention": _ATTENTION,
    "mlp": _MLP,
    "experts": _MLP,
    "linear": (*_ATTENTION, *_MLP, "linear"),  # "linear" alone: outside the table
}
ROLES: tuple[str, ...] = tuple(r for r in get_args(Kind) if r not in GROUPS)


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class Rule(BaseModel):
    """One rule: which tensors, and what happens to them.

    Exactly one of ``glob``, ``regex`` and ``role`` selects tensors; ``layers`` narrows the selection. ``keep`` excludes
    ``scheme`` and its options; what is left out comes from the recipe's top level.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    glob: list[str] | None = Field(default=None, min_length=1)
    regex: str | None = None
    role: list[Kind] | None = Field(default=None, min_length=1)
    layers: str | None = None
    scheme: str | None = None
    bits: int | None = None
    effort: Effort | None = None
    levels: int | None = None
    group_size: int | None = None
    keep: bool = False

    _lists = field_validator("glob", "role", mode="before")(_listed)

    @field_validator("regex")
    @classmethod
    def _compiles(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "")
        except re.error as e:
            raise ValueError(f"is not a regular expression: {e}") from e
        return value

    @field_validator("layers")
    @classmethod
    def _ranges(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", value):
            raise ValueError("must be block numbers and ranges such as '0-3,28,30-31'")
        return value

    @field_validator("scheme")
    @classmethod
    def _scheme(cls, value: str | None) -> str | None:
        return None if value is None else check_scheme_name(value)

    @model_validator(mode="after")
    def _whole(self) -> Rule:
        selectors = [k for k in ("glob", "regex", "role") if getattr(self, k) is not None]
        if len(selectors) != 1:
            raise ValueError(
                f"needs exactly one of glob, regex, role; found {', '.join(selectors) or 'none'}"
            )
        if self.keep and any((self.scheme, self.bits, self.effort, self.levels, self.group_size)):
            raise ValueError("keep = true cannot go with scheme, bits, effort, levels or group_size")
        return self

    @property
    def open(self) -> bool:
        """Whether a bit budget chooses the scheme of what this rule selects."""
        return not (self.keep or self.scheme or self.bits or self.levels or self.group_size)

    @cached_property
    def _layer_ranges(self) -> list[tuple[int, int]]:
        pairs = [part.partition("-") for part in (self.layers or "").split(",") if part]
        return [(int(a), int(b or a)) for a, _, b in pairs]

    def matches(self, name: str, kind: str, layer: int | None, expert: bool) -> bool:
        """Whether this rule selects a tensor.

        Parameters
        ----------
        name : str
            The checkpoint's name of the tensor.
        kind : str
            Its role.
        layer : int or None
            Its block.
        expert : bool
            Whether it belongs to routed experts.
        """
        if self._layer_ranges and (layer is None or not any(a <= layer <= b for a, b in self._layer_ranges)):
            return False
        if self.glob is not None:
            return any(fnmatchcase(name, g) for g in self.glob)
        if self.regex is not None:
            return re.fullmatch(self.regex, name) is not None
        return any(kind in GROUPS.get(r, (r,)) and (expert or r != "experts") for r in self.role or ())

    def __str__(self) -> str:
        """What selects, for messages."""
        selectors = {"glob": self.glob, "regex": self.regex, "role": self.role, "layers": self.layers}
        return ", ".join(f"{k} = {json.dumps(v)}" for k, v in selectors.items() if v is not None)


DEFAULT_RULES: tuple[Rule, ...] = (
    Rule(role=["norm", "bias", "router", "vector", "buffer", "other", "embed"], keep=True),
    Rule(role=["head"], scheme="kmeans", bits=8),
    Rule(role=["linear"]),
)
