"""What a GGUF says of routed experts, and which models with experts engines compute as their makers do.

A file has no key for most choices of routing: the family fixes them. A model that chooses otherwise would load and talk
nonsense, so it is refused. Every layer of these families has experts; a plain feed-forward in between has no place.

Source: llama.cpp, src/models (what each family's graph does) and conversion (keys).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trapetum.formats.gguf_config import ROPE_TRUNCATE
from trapetum.formats.gguf_values import KeyValue, ValueType
from trapetum.models.config import ModelConfig
from trapetum.models.experts import SECTION, Routing
from trapetum.models.layer_types import FULL, SLIDING

__all__ = ["expert_faults", "expert_pairs"]


@dataclass(frozen=True)
class _Rule:
    """What engines do in a family.

    Parameters
    ----------
    normalise : bool
        Weights of the chosen experts add up to 1.
    width : bool
        The width of an expert has a key of its own.
    alternating : bool
        Layers 0, 2, 4 ... have the sliding window, the others none.
    """

    normalise: bool
    width: bool = False
    alternating: bool = False


_RULES: Mapping[str, _Rule] = {
    "llama": _Rule(normalise=True),
    "qwen2moe": _Rule(normalise=False, width=True),
    "qwen3moe": _Rule(normalise=True, width=True),
    "olmoe": _Rule(normalise=False),
    "gpt-oss": _Rule(normalise=True, width=True, alternating=True),
    "qwen3next": _Rule(normalise=True, width=True),
    "qwen35moe": _Rule(normalise=True, width=True),
}


def expert_faults(config: ModelConfig, family: str) -> list[str]:
    """Why engines would compute another model; empty where they would not."""
    routing, rule = config.sections.get(SECTION), _RULES.get(family)
    if not isinstance(routing, Routing) or rule is None:
        return []
    faults = []
    if not all(routing.sparse):
        plain = routing.sparse.index(False)
        faults.append(
            f"layer {plain} has no experts, and engines expect them in every layer of the family {family}"
        )
    if routing.normalise != rule.normalise:
        does = "always" if rule.normalise else "never"
        faults.append(
            f"norm_topk_prob is {str(routing.normalise).lower()}, and engines {does} normalise in the family {family}"
        )
    if rule.alternating and config.layer_types != tuple(
        (SLIDING, FULL)[i % 2] for i in range(config.num_hidden_layers)
    ):
        faults.append(
            f"layer_types do not alternate from a sliding window on, as engines expect in the family {family}"
        )
    if routing.activation == "clamped" and (routing.alpha, routing.limit) != (1.702, 7.0):
        faults.append(
            f"swiglu_alpha and swiglu_limit are {routing.alpha:g} and {routing.limit:g}; engines have 1.702 and 7"
        )
    return faults


def expert_pairs(config: ModelConfig, family: str) -> dict[str, KeyValue]:
    """Keys about experts, and about the window of a family whose engines apply it."""
    routing, rule = config.sections.get(SECTION), _RULES.get(family)
    if not isinstance(routing, Routing) or rule is None:
        return {}
    counts = {"expert_count": routing.experts, "expert_used_count": routing.chosen}
    if rule.width:
        counts["expert_feed_forward_length"] = routing.expert_size
    if routing.shared_size:
        counts["expert_shared_feed_forward_length"] = routing.shared_size
    if rule.alternating:
        counts["attention.sliding_window"] = next(w for w in config.windows if w is not None)
    pairs = {f"{family}.{key}": KeyValue.count(value) for key, value in counts.items()}
    if family == "gpt-oss" and config.rope.type == "yarn":
        pairs[ROPE_TRUNCATE] = KeyValue(config.rope.truncate, ValueType.BOOL)
    return pairs
