"""Rotary position embedding as a config states it: type, parameters and the inverse frequencies they mean.

=========  ==================================================================================================
type       inverse frequency of pair d of a head of ``head_dim`` (d = 0 .. head_dim/2 - 1)
=========  ==================================================================================================
default    ``theta ** (-2d / head_dim)``
linear     default / factor
llama3     default where the wavelength is short, default / factor where it is long, a blend between
explicit   a list that the file itself carries (``trapetum_inv_freq``: ``.cbk`` files store nothing else)
=========  ==================================================================================================

Every other type changes the numbers of every token, so it is refused by name and never ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trapetum.errors import CheckpointError, UnsupportedModelError

__all__ = ["Rope", "parse_rope"]

_DEFAULT_THETA = 10000.0  # what transformers assumes for every family of the table when the key is missing


@dataclass(frozen=True)
class Rope:
    """Parameters of the rotary embedding.

    Parameters
    ----------
    type : str
        ``default``, ``linear``, ``llama3`` or ``explicit``.
    theta : float
        Base of the geometric series.
    factor, low_freq_factor, high_freq_factor : float
        As the type needs them.
    original_max_position_embeddings : int
        Context length before the extension (llama3).
    explicit : tuple of float
        The inverse frequencies themselves (type ``explicit``).
    """

    type: str = "default"
    theta: float = _DEFAULT_THETA
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    explicit: tuple[float, ...] = ()

    def inverse_frequencies(self, head_dim: int) -> NDArray[np.float32]:
        """Radians a position, by pair.

        Parameters
        ----------
        head_dim : int
            Even.

        Returns
        -------
        ndarray of float32, shape (head_dim / 2,)
            Computed in float64, rounded once.

        Examples
        --------
        >>> Rope(theta=100.0).inverse_frequencies(4).tolist()
        [1.0, 0.10000000149011612]
        """
        return _TYPES[self.type].frequencies(self, head_dim).astype(np.float32)


def _default(rope: Rope, head_dim: int) -> NDArray[np.float64]:
    return rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


def _linear(rope: Rope, head_dim: int) -> NDArray[np.float64]:
    return _default(rope, head_dim) / rope.factor


def _llama3(rope: Rope, head_dim: int) -> NDArray[np.float64]:
    inv = _default(rope, head_dim)
    # turns that the pair makes over the original context: many turns keep, few turns stretch
    turns = rope.original_max_position_embeddings * inv / (2 * math.pi)
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return (1.0 - smooth) * inv / rope.factor + smooth * inv


def _explicit(rope: Rope, head_dim: int) -> NDArray[np.float64]:
    return np.asarray(rope.explicit, np.float64)


@dataclass(frozen=True)
class _Type:
    """One row of the table above: the formula and the keys that it needs."""

    frequencies: Callable[[Rope, int], NDArray[np.float64]]
    keys: tuple[str, ...] = ()


_TYPES = {
    "default": _Type(_default),
    "linear": _Type(_linear, ("factor",)),
    "llama3": _Type(
        _llama3,
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    ),
    "explicit": _Type(_explicit),
}


def parse_rope(config: Mapping[str, Any], head_dim: int) -> Rope:
    """Read every spelling: top-level ``rope_theta``, ``rope_scaling``, ``rope_parameters``.

    Where both are given, the value inside ``rope_parameters``/``rope_scaling`` wins, as in transformers.

    Parameters
    ----------
    config : mapping
        The (text part of the) content of config.json.
    head_dim : int

    Raises
    ------
    UnsupportedModelError
        If the type is not in the table, or only a part of each head is rotated.
    CheckpointError
        If a key that the type needs is missing or not a positive number.
    """
    if head_dim % 2:
        raise CheckpointError(f"config.json: head_dim is {head_dim}; rotary embedding needs an even number")
    if (listed := config.get("trapetum_inv_freq")) is not None:
        return Rope("explicit", explicit=_explicit_values(listed, head_dim))
    where = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    stated = config.get(where) or {}
    if not isinstance(stated, Mapping) or any(isinstance(v, Mapping) for v in stated.values()):
        raise UnsupportedModelError(f"config.json: {where} is not one set of parameters for all layers")
    kind = stated.get("rope_type", stated.get("type")) or "default"
    if kind not in _TYPES or kind == "explicit":
        known = ", ".join(t for t in _TYPES if t != "explicit")
        raise UnsupportedModelError(
            f"config.json: rope type {kind!r} in {where} is not supported; known are {known}",
            hint="without it every logit would be wrong, so it is not ignored",
        )
    for part in (stated.get("partial_rotary_factor"), config.get("partial_rotary_factor")):
        if part not in (None, 1, 1.0):
            raise UnsupportedModelError(
                f"config.json: partial_rotary_factor is {part!r}; only 1 is supported"
            )
    both = {**{k: v for k, v in config.items() if v is not None}, **stated}
    values = {key: _positive(both, key, where) for key in _TYPES[kind].keys}
    if kind == "llama3" and values["high_freq_factor"] <= values["low_freq_factor"]:
        raise CheckpointError(f"config.json: high_freq_factor must exceed low_freq_factor in {where}")
    if both.get("rope_theta") is not None:
        values["theta"] = _positive(both, "rope_theta", where)
    if "original_max_position_embeddings" in values:
        values["original_max_position_embeddings"] = int(values["original_max_position_embeddings"])
    return Rope(kind, **values)  # type: ignore[arg-type]


def _positive(values: Mapping[str, Any], key: str, where: str) -> float:
    if key not in values:
        raise CheckpointError(f"config.json: key {key!r} is missing in {where}")
    value = values[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise CheckpointError(f"config.json: {key} is {value!r}; a positive number is expected")
    return float(value)


def _explicit_values(listed: Any, head_dim: int) -> tuple[float, ...]:
    values = tuple(float(v) for v in listed)
    if len(values) != head_dim // 2 or not all(map(math.isfinite, values)):
        raise CheckpointError(
            f"config.json: trapetum_inv_freq holds {len(values)} values; "
            f"{head_dim // 2} finite ones are expected"
        )
    return values
