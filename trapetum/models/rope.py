"""Rotary position embedding as a config states it: type, parameters and the inverse frequencies they mean.

=========  ==================================================================================================
type       inverse frequency of pair d of ``dim`` rotated values (d = 0 .. dim/2 - 1)
=========  ==================================================================================================
default    ``theta ** (-2d / dim)``
linear     default / factor
dynamic    default, with a larger theta once the text is longer than max_position_embeddings
llama3     default where the wavelength is short, default / factor where it is long, a blend between
yarn       the same idea with the ramp linear in d; cosine and sine are scaled as well
longrope   default / a listed factor: one list for short texts, one for long ones; cosine and sine are scaled
explicit   a list that the file itself carries (``trapetum_inv_freq``: ``.cbk`` files store nothing else)
=========  ==================================================================================================

Every other type changes the numbers of every token, so it is refused by name and never ignored.

Source: transformers, modeling_rope_utils (the definitions that checkpoints were made for); arXiv 2309.00071 (YaRN),
arXiv 2402.13753 (LongRoPE).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trapetum.errors import CheckpointError, UnsupportedModelError

__all__ = ["Rope", "parse_rope", "parse_ropes"]

_DEFAULT_THETA = 10000.0  # where neither config.json nor the family's defaults say it
_WIDEST = 1 << 16  # far beyond any head, and no burden to compute
_LONGEST = 2**31 - 1  # positions of any text
_ALIASES = {"su": "longrope", "none": "default"}  # Phi-3's first spelling


@dataclass(frozen=True)
class Rope:
    """Parameters of the rotary embedding.

    Parameters
    ----------
    type : str
        A key of the table above.
    theta : float
        Base of the geometric series.
    factor, low_freq_factor, high_freq_factor, beta_fast, beta_slow, mscale, mscale_all_dim : float
        As the type needs them.
    truncate : bool
        Ends of yarn's ramp are whole pairs.
    original_max_position_embeddings : int
        Context length before the extension (llama3, yarn, longrope; of dynamic, the length that changes nothing).
    attention_factor : float, optional
        What multiplies cosine and sine (yarn, longrope); computed where left out.
    explicit, short_factor, long_factor : tuple of float
        A value a pair: the inverse frequencies themselves (explicit), divisors of them (longrope).
    """

    type: str = "default"
    theta: float = _DEFAULT_THETA
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    original_max_position_embeddings: int = 0
    attention_factor: float | None = None
    explicit: tuple[float, ...] = ()
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def inverse_frequencies(self, dim: int, length: int = 0) -> NDArray[np.float32]:
        """Radians a position, by pair.

        Parameters
        ----------
        dim : int
            Rotated values of a head; even.
        length : int
            Positions of the whole text, which two types depend on (see :meth:`regime`).

        Returns
        -------
        ndarray of float32, shape (dim / 2,)
            Computed in float64, rounded once.

        Examples
        --------
        >>> Rope(theta=100.0).inverse_frequencies(4).tolist()
        [1.0, 0.10000000149011612]
        """
        return _TYPES[self.type].frequencies(self, dim, length).astype(np.float32)

    @property
    def magnitude(self) -> float:
        """What multiplies cosine and sine."""
        if self.attention_factor is not None:
            return self.attention_factor
        return _TYPES[self.type].magnitude(self)

    def regime(self, length: int) -> int:
        """Texts of lengths with one number have the same frequencies."""
        if self.type not in ("dynamic", "longrope"):
            return 0
        beyond = length > self.original_max_position_embeddings
        return length if beyond and self.type == "dynamic" else int(beyond)


def _default(rope: Rope, dim: int, length: int = 0) -> NDArray[np.float64]:
    return _series(rope.theta, dim)


def _series(theta: float, dim: int) -> NDArray[np.float64]:
    return np.asarray(theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim), np.float64)


def _linear(rope: Rope, dim: int, length: int) -> NDArray[np.float64]:
    return _default(rope, dim) / rope.factor


def _dynamic(rope: Rope, dim: int, length: int) -> NDArray[np.float64]:
    stretch = max(1.0, length / rope.original_max_position_embeddings)
    return _series(rope.theta * (rope.factor * stretch - (rope.factor - 1)) ** (dim / (dim - 2)), dim)


def _llama3(rope: Rope, dim: int, length: int) -> NDArray[np.float64]:
    inv = _default(rope, dim)
    # turns that the pair makes over the original context: many turns keep, few turns stretch
    turns = rope.original_max_position_embeddings * inv / (2 * math.pi)
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return (1.0 - smooth) * inv / rope.factor + smooth * inv


def _yarn(rope: Rope, dim: int, length: int) -> NDArray[np.float64]:
    def pair_of(turns: float) -> float:
        """The pair that makes so many turns over the original context."""
        ratio = rope.original_max_position_embeddings / (turns * 2 * math.pi)
        return dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 * (low == high)
    stretched = np.clip((np.arange(dim // 2) - low) / (high - low), 0.0, 1.0)
    inv = _default(rope, dim)
    return np.asarray(stretched * inv / rope.factor + (1.0 - stretched) * inv)


def _longrope(rope: Rope, dim: int, length: int) -> NDArray[np.float64]:
    factors = rope.long_factor if rope.regime(length) else rope.short_factor
    return _default(rope, dim) / np.asarray(factors, np.float64)


def _explicit(rope: Rope, dim: int, length: int) -> NDArray[np.float64]:
    return np.asarray(rope.explicit, np.float64)


def _one(rope: Rope) -> float:
    return 1.0


def _yarn_magnitude(rope: Rope) -> float:
    def scale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


def _longrope_magnitude(rope: Rope) -> float:
    if rope.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position_embeddings))


@dataclass(frozen=True)
class _Type:
    """One row of the table above: the formula, and the keys that it needs, may have, and reads as lists."""

    frequencies: Callable[[Rope, int, int], NDArray[np.float64]]
    keys: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()
    magnitude: Callable[[Rope], float] = _one


_ORIGINAL = "original_max_position_embeddings"
_TYPES = {
    "default": _Type(_default),
    "linear": _Type(_linear, ("factor",)),
    "dynamic": _Type(_dynamic, ("factor", _ORIGINAL)),
    "llama3": _Type(_llama3, ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL)),
    "yarn": _Type(
        _yarn,
        ("factor", _ORIGINAL),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
        magnitude=_yarn_magnitude,
    ),
    "longrope": _Type(
        _longrope,
        ("factor", _ORIGINAL),
        ("attention_factor",),
        ("short_factor", "long_factor"),
        _longrope_magnitude,
    ),
    "explicit": _Type(_explicit),
}


def parse_ropes(
    config: Mapping[str, Any], dim: int, layer_types: Sequence[str], *, local: bool = False
) -> tuple[Rope | None, ...]:
    """The rotary embedding of each layer.

    Parameters
    ----------
    config : mapping
        The (text part of the) content of config.json, with the family's defaults.
    dim : int
        Rotated values of a head.
    layer_types : sequence of str
        ``rope_parameters`` may be given by type; a type whose entry is null has none.
    local : bool
        Layers with a window have no scaling where there is one set of parameters, and ``rope_local_base_freq``
        as their base where that is given.

    Raises
    ------
    See :func:`parse_rope`.
    """
    stated = config.get("rope_parameters") or config.get("rope_scaling")
    nested = isinstance(stated, Mapping) and any(t in stated for t in layer_types)
    ropes: dict[str, Rope | None] = {}
    for kind in dict.fromkeys(layer_types):
        given = dict(config)
        is_local = local and kind == "sliding_attention"
        if is_local:
            base = config.get("rope_theta", _DEFAULT_THETA)
            given["rope_theta"] = config.get("rope_local_base_freq", base)
        if nested and isinstance(stated, Mapping):
            if kind not in stated:
                raise CheckpointError(f"config.json: rope_parameters says nothing about {kind} layers")
            if stated[kind] is None:
                ropes[kind] = None
                continue
            given["rope_parameters"] = stated[kind]
        elif is_local:
            given.pop("rope_parameters", None)
            given.pop("rope_scaling", None)
        ropes[kind] = parse_rope(given, dim)
    return tuple(ropes[kind] for kind in layer_types)


def parse_rope(config: Mapping[str, Any], dim: int) -> Rope:
    """Read every spelling: top-level ``rope_theta``, ``rope_scaling``, ``rope_parameters``.

    Where both are given, the value inside ``rope_parameters``/``rope_scaling`` wins, as in transformers.

    Parameters
    ----------
    config : mapping
        The (text part of the) content of config.json.
    dim : int
        Rotated values of a head.

    Raises
    ------
    UnsupportedModelError
        If the type is not in the table.
    CheckpointError
        If a key that the type needs is missing or not a positive number.
    """
    if dim % 2 or not 0 < dim <= _WIDEST:
        raise CheckpointError(
            f"config.json: {dim} values of each head are rotated (head_dim); an even number up to {_WIDEST} is needed"
        )
    if (listed := config.get("trapetum_inv_freq")) is not None:
        return Rope("explicit", explicit=_list(listed, "trapetum_inv_freq", dim))
    where = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    stated = config.get(where) or {}
    if not isinstance(stated, Mapping) or any(isinstance(v, Mapping) for v in stated.values()):
        raise UnsupportedModelError(f"config.json: {where} is not one set of parameters for all layers")
    said = stated.get("rope_type", stated.get("type")) or "default"
    kind = _ALIASES.get(said, said) if isinstance(said, str) else said
    if kind == "yarn" and stated.get("long_factor") is not None:
        kind = "longrope"  # Phi-3's second spelling
    if not isinstance(kind, str) or kind not in _TYPES or kind == "explicit":
        known = ", ".join(t for t in _TYPES if t != "explicit")
        raise UnsupportedModelError(
            f"config.json: rope type {said!r} in {where} is not supported; known are {known}",
            hint="without it every logit would be wrong, so it is not ignored",
        )
    both = {k: v for k, v in {**config, **stated}.items() if v is not None}
    _complete(both, config, kind)
    row = _TYPES[kind]
    optional = [k for k in row.optional if k in both and both[k] != 0]
    values: dict[str, Any] = {key: _positive(both, key, where) for key in (*row.keys, *optional)}
    values |= {key: _list(both.get(key), key, dim) for key in row.lists}
    if kind == "llama3" and values["high_freq_factor"] <= values["low_freq_factor"]:
        raise CheckpointError(f"config.json: high_freq_factor must exceed low_freq_factor in {where}")
    if both.get("rope_theta") is not None:
        values["theta"] = _positive(both, "rope_theta", where)
    if kind == "yarn" and "truncate" in both:
        values["truncate"] = bool(both["truncate"])
    if _ORIGINAL in values:
        values[_ORIGINAL] = int(values[_ORIGINAL])
    return _checked(Rope(kind, **values), dim, where)


def _checked(rope: Rope, dim: int, where: str) -> Rope:
    """Refuse values that are allowed one by one and give no frequencies together."""
    try:
        with np.errstate(over="raise", divide="raise", invalid="raise"):
            numbers = [rope.inverse_frequencies(dim, length) for length in (1, _LONGEST)]
        usable = math.isfinite(rope.magnitude) and all(np.isfinite(n).all() for n in numbers)
    except (ArithmeticError, ValueError):  # a logarithm of nothing, a division by nothing
        usable = False
    if not usable:
        raise CheckpointError(f"config.json: the values in {where} give no rotary frequencies ({rope.type})")
    return rope


def _complete(both: dict[str, Any], config: Mapping[str, Any], kind: str) -> None:
    """What other keys say of the context's length before and after the extension."""
    reach = config.get("max_position_embeddings")
    outer = config.get(_ORIGINAL)  # Phi-3: outside; wins, as in transformers
    if kind == "dynamic":
        both.setdefault(_ORIGINAL, reach)
        both[_ORIGINAL] = reach or both[_ORIGINAL]
    elif outer is not None:
        both[_ORIGINAL] = outer
    elif reach is not None:
        both.setdefault(_ORIGINAL, reach)
    if kind in ("yarn", "longrope") and "factor" not in both and reach and _ORIGINAL in both:
        both["factor"] = reach / both[_ORIGINAL]
    if both.get(_ORIGINAL) is None:
        both.pop(_ORIGINAL, None)


def _positive(values: Mapping[str, Any], key: str, where: str) -> float:
    if key not in values:
        raise CheckpointError(f"config.json: key {key!r} is missing in {where}")
    value = values[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise CheckpointError(f"config.json: {key} is {value!r}; a positive number is expected")
    return float(value)


def _list(listed: Any, key: str, dim: int) -> tuple[float, ...]:
    if not isinstance(listed, list | tuple) or any(
        isinstance(v, bool) or not isinstance(v, int | float) or not math.isfinite(v) for v in listed
    ):
        raise CheckpointError(f"config.json: {key} must be a list of finite numbers")
    if len(listed) != dim // 2:
        raise CheckpointError(f"config.json: {key} holds {len(listed)} values; {dim // 2} are expected")
    return tuple(float(v) for v in listed)
