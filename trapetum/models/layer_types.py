"""The type of each layer, as config.json says it: full or sliding attention, linear attention ...

A family names one of these functions as its ``layer_types``. ``layer_types`` of config.json counts wherever it is
given; a function says what its absence means.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trapetum.errors import CheckpointError, UnsupportedModelError

__all__ = [
    "FULL",
    "SLIDING",
    "alternating",
    "listed_types",
    "rotary_layers",
    "sliding_where_given",
    "sliding_without_rotary",
    "switched",
    "window_layers",
]

FULL, SLIDING = "full_attention", "sliding_attention"


def _every(given: Mapping[str, Any], key: str, default: int) -> int:
    """A key that says every how many layers something changes."""
    value = given.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"config.json: {key} is {value!r}; a positive integer is expected")
    return value


def listed_types(
    given: Mapping[str, Any], layers: int, allowed: tuple[str, ...] = (SLIDING, FULL)
) -> tuple[str, ...] | None:
    """``layer_types`` of config.json; None where there is none.

    Raises
    ------
    UnsupportedModelError
        If it names other types, or not one for each layer.
    """
    types = given.get("layer_types")
    if types is None:
        return None
    named = isinstance(types, list | tuple) and all(isinstance(t, str) for t in types)
    if not named or len(types) != layers or set(types) - set(allowed):
        raise UnsupportedModelError(
            f"config.json: layer_types must name {' or '.join(allowed)} for each of {layers} layers"
        )
    return tuple(types)


def sliding_where_given(given: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """Every layer has the window where there is one (Mistral, Phi-3)."""
    default = SLIDING if "sliding_window" in given else FULL
    return listed_types(given, layers) or (default,) * layers


def window_layers(given: Mapping[str, Any]) -> int:
    """``max_window_layers`` of the Qwen families, by default 28."""
    value = given.get("max_window_layers", 28)
    if not isinstance(value, int):
        raise CheckpointError(f"config.json: max_window_layers is {value!r}; an integer is expected")
    return value


def switched(given: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """Qwen: no window unless ``use_sliding_window``; then by ``layer_types``, else from ``max_window_layers`` on."""
    types = listed_types(given, layers)
    if not given.get("use_sliding_window"):
        return (FULL,) * layers
    first = window_layers(given)
    return types or tuple(SLIDING if i >= first else FULL for i in range(layers))


def alternating(given: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """Every ``sliding_window_pattern``-th layer is full (Gemma)."""
    pattern = _every(given, "sliding_window_pattern", 1)
    return listed_types(given, layers) or tuple(
        FULL if (i + 1) % pattern == 0 else SLIDING for i in range(layers)
    )


def rotary_layers(given: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    """Which layers have a rotary embedding (SmolLM3): ``no_rope_layers`` holds a 0 for those that have none.

    Raises
    ------
    CheckpointError
        If it is not a list of as many numbers.
    """
    interval = _every(given, "no_rope_layer_interval", 4)
    flags = given.get("no_rope_layers", [(i + 1) % interval != 0 for i in range(layers)])
    if not isinstance(flags, list | tuple) or len(flags) < layers:
        raise CheckpointError("config.json: no_rope_layers must hold a 0 or a 1 for each layer")
    return tuple(bool(flag) for flag in flags[:layers])


def sliding_without_rotary(given: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """Where the window is switched on, layers without rotary embedding have it (SmolLM3)."""
    on = given.get("use_sliding_window") and "sliding_window" in given
    return listed_types(given, layers) or tuple(
        SLIDING if on and not rotary else FULL for rotary in rotary_layers(given, layers)
    )
