"""What a GGUF says of attention and positions, and which models engines compute as their makers do.

A file has keys for sizes, bases and a few options; the rest is fixed by the family: which layers have a window or no
rotary embedding, what multiplies the scores, which activation a feed-forward has. A model that differs would load and
talk nonsense, so it is refused; what only changes long texts is said in a note.

Rotary types: ``linear`` and ``yarn`` are keys; the factors of ``llama3`` and ``longrope`` are tensors; ``dynamic`` has
no place, and changes nothing up to the trained length.

Source: llama.cpp, src/models (what each family's graph does), src/llama-context.cpp (YaRN) and conversion (keys).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trapetum.formats.gguf_names import ROPE_FACTORS, ROPE_LONG, ROPE_SHORT
from trapetum.formats.gguf_values import KeyValue, ValueType
from trapetum.models.config import ModelConfig
from trapetum.models.layer_types import SLIDING
from trapetum.models.rope import Rope

__all__ = ["attention_faults", "attention_notes", "attention_pairs", "rope_tensors"]


@dataclass(frozen=True)
class _Rule:
    """What engines do in a family.

    Parameters
    ----------
    act : str
        Activation of the feed-forward.
    full_every : int
        Every so many layers one has full attention, the others the window; 0: none has a window.
    any_pattern : bool
        Another pattern can be stated.
    no_rotary_every : int
        Every so many layers one has no rotary embedding; 0: all have one.
    factors : tuple of str
        Rotary types whose factors engines read as tensors.
    local : str
        Rotary embedding of layers with a window: ``same`` as of the others; unscaled with its ``own`` base; ``plain``:
        unscaled with the base of the others.
    default_window : bool
        Layers have a window even where no key says so.
    softcaps : frozenset of str
        ``attn``, ``final``: those that engines apply.
    needs_caps : bool
        They always apply all of them.
    plain_heads : bool
        ``head_dim`` is the hidden size over the number of heads.
    all_keys : bool
        There are as many key/value heads as query heads.
    multipliers : bool
        Scores, embeddings, outputs of blocks and logits are multiplied by what keys say.
    big : tuple of int
        Numbers of layers for which scores are scaled by hidden size over heads instead of ``head_dim``.
    """

    act: str = "silu"
    full_every: int = 0
    any_pattern: bool = False
    no_rotary_every: int = 0
    factors: tuple[str, ...] = ()
    local: str = "same"
    default_window: bool = False
    softcaps: frozenset[str] = frozenset()
    needs_caps: bool = False
    plain_heads: bool = False
    all_keys: bool = False
    multipliers: bool = False
    big: tuple[int, ...] = ()


_GELU = "gelu_pytorch_tanh"
_RULES: Mapping[str, _Rule] = {
    "llama": _Rule(factors=("llama3", "explicit")),
    "phi3": _Rule(factors=("longrope",), plain_heads=True),
    "gemma": _Rule(act=_GELU),
    "gemma2": _Rule(
        act=_GELU,
        default_window=True,
        full_every=2,
        any_pattern=True,
        softcaps=frozenset({"attn", "final"}),
        needs_caps=True,
        big=(46,),
    ),
    "gemma3": _Rule(
        act=_GELU,
        full_every=6,
        any_pattern=True,
        local="own",
        softcaps=frozenset({"final"}),
        big=(62,),
    ),
    "granite": _Rule(factors=("llama3", "explicit"), multipliers=True),
    "smollm3": _Rule(no_rotary_every=4),
    "olmo2": _Rule(plain_heads=True, full_every=4, any_pattern=True, local="plain"),
    "olmoe": _Rule(plain_heads=True, all_keys=True),
    "gpt-oss": _Rule(full_every=2),
}

_MULTIPLIER_KEYS = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention.scale": "attention_multiplier",
    "logit_scale": "logits_scaling",
}


def _rule(family: str) -> _Rule:
    return _RULES.get(family, _Rule())


def _ropes(config: ModelConfig) -> tuple[Rope, Rope]:
    """(of layers with full attention, of those with a window)."""
    local = (r for r, kind in zip(config.ropes, config.layer_types) if kind == SLIDING and r is not None)
    return config.rope, next(local, config.rope)


def attention_faults(config: ModelConfig, family: str) -> list[str]:
    """Why engines would compute another model; empty where they would not."""
    rule, faults = _rule(family), []

    def refuse(what: str) -> None:
        faults.append(f"{what} in the family {family}")

    if config.hidden_act != rule.act:
        refuse(f"hidden_act is {config.hidden_act}, and engines compute {rule.act}")
    if rule.plain_heads and config.num_attention_heads * config.head_dim != config.hidden_size:
        refuse(f"head_dim is {config.head_dim}, and engines expect hidden_size over num_attention_heads")
    if rule.all_keys and config.num_key_value_heads != config.num_attention_heads:
        refuse("num_key_value_heads is less than num_attention_heads, and engines expect as many")
    width = config.hidden_size // config.num_attention_heads
    scale = (width if config.num_hidden_layers in rule.big else config.head_dim) ** -0.5
    ours = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
    if abs(ours / scale - 1) > 1e-6 and not rule.multipliers:
        refuse(
            f"attention scores are multiplied by {ours:g} (query_pre_attn_scalar), and engines multiply by {scale:g}"
        )
    for name, cap in (("attn", config.attention_softcap), ("final", config.logit_softcap)):
        if cap is not None and name not in rule.softcaps:
            refuse(f"{name}_logit_softcapping is {cap:g}, and engines apply none")
        if cap is None and rule.needs_caps:
            refuse(f"{name}_logit_softcapping is not set, and engines always apply one")
    return faults + _rotary_faults(config, family, rule)


def _rotary_faults(config: ModelConfig, family: str, rule: _Rule) -> list[str]:
    faults = []
    every = rule.no_rotary_every
    expected = [bool(every) and (i + 1) % every == 0 for i in range(config.num_hidden_layers)]
    if config.num_hidden_layers and [rope is None for rope in config.ropes] != expected:
        have = f"every layer but each {every}th has one" if every else "every layer has one"
        faults.append(
            f"some layers have no rotary embedding, and {have} in the family {family} as engines compute it"
        )
    full, local = _ropes(config)
    unscaled = rule.local != "same" and local.type == "default"
    if local != full and not (unscaled and (rule.local == "own" or local.theta == full.theta)):
        faults.append(
            f"layers with a window have another rotary embedding, which the family {family} has not"
        )
    if full.type in ("llama3", "explicit", "longrope") and full.type not in rule.factors:
        faults.append(
            f"the rotary embedding {full.type} needs {ROPE_LONG if full.type == 'longrope' else ROPE_FACTORS}, "
            f"which engines do not read in the family {family}"
        )
    if full.type == "yarn" and (full.beta_fast, full.beta_slow) != (32.0, 1.0):
        faults.append(
            f"beta_fast and beta_slow of YaRN are {full.beta_fast:g} and {full.beta_slow:g}, "
            f"and engines have 32 and 1 in the family {family}"
        )
    return faults


def attention_notes(config: ModelConfig, family: str) -> list[str]:
    """What engines leave out of long texts."""
    notes, rule, rope = [], _rule(family), config.rope
    reach = config.max_position_embeddings
    windows = {w for w in config.windows if w is not None and (reach is None or w < reach)}
    if windows and not rule.full_every:
        notes.append(
            f"llama.cpp does not apply the sliding window of {min(windows)} positions in the family "
            f"{family}: longer texts come out differently"
        )
    if rope.type == "dynamic":
        notes.append(
            f"engines know no dynamic rotary scaling: texts of more than {rope.original_max_position_embeddings} "
            "tokens come out differently"
        )
    if rope.type == "longrope":
        notes.append(
            "llama.cpp takes the long rotary factors where its context, not the text, has more than "
            f"{rope.original_max_position_embeddings} positions: give a smaller one for short texts"
        )
    if rope.type == "yarn" and not rope.truncate:
        notes.append("engines cut the ramp of YaRN at whole pairs, which this model does not")
    return notes


def attention_pairs(config: ModelConfig, family: str) -> dict[str, KeyValue]:
    """Keys about windows, caps and positions, without the family's name."""
    rule = _rule(family)
    full, local = _ropes(config)
    pairs = {
        "rope.dimension_count": KeyValue.count(config.rotary_dim),
        "rope.freq_base": KeyValue.number(full.theta),
    }
    if rule.local == "own" and local != full:
        pairs["rope.freq_base_swa"] = KeyValue.number(local.theta)
    pairs |= _scaling_pairs(full)
    for name, cap in (("attn", config.attention_softcap), ("final", config.logit_softcap)):
        if cap is not None:
            pairs[f"{name}_logit_softcapping"] = KeyValue.number(cap)
    if rule.multipliers:
        stated = config.multipliers
        pairs |= {key: KeyValue.number(stated[said]) for key, said in _MULTIPLIER_KEYS.items()}
        eps = config.rms_norm_eps * stated["residual_multiplier"] ** 2
        pairs["attention.layer_norm_rms_epsilon"] = KeyValue.number(eps)
    return pairs | _window_pairs(config, rule)


def _window_pairs(config: ModelConfig, rule: _Rule) -> dict[str, KeyValue]:
    """The window, and which layers have it where that is not the family's own pattern."""
    if not rule.any_pattern:
        return {}
    has = [w is not None for w in config.windows]
    usual = [(i + 1) % rule.full_every != 0 for i in range(len(has))]
    window = next((w for w in config.windows if w is not None), None)
    pairs: dict[str, KeyValue] = {}
    if window is None and not rule.default_window:
        return pairs
    if window is not None:
        pairs["attention.sliding_window"] = KeyValue.count(window)
    if has != usual:
        pairs["attention.sliding_window_pattern"] = KeyValue(has, ValueType.ARRAY, ValueType.BOOL)
    return pairs


def _scaling_pairs(rope: Rope) -> dict[str, KeyValue]:
    original = {"rope.scaling.original_context_length": KeyValue.count(rope.original_max_position_embeddings)}
    if rope.type == "linear":
        return {
            "rope.scaling.type": KeyValue.text("linear"),
            "rope.scaling.factor": KeyValue.number(rope.factor),
        }
    if rope.type == "llama3":  # the factors are a tensor; this says where they come from
        return original
    if rope.type == "longrope":
        return original | {"rope.scaling.attn_factor": KeyValue.number(rope.magnitude)}
    if rope.type != "yarn":
        return {}
    pairs = {
        "rope.scaling.type": KeyValue.text("yarn"),
        "rope.scaling.factor": KeyValue.number(rope.factor),
        **original,
    }
    if rope.mscale_all_dim:  # DeepSeek: engines have it from a key of its own (``export.gguf_latent``)
        return pairs
    usual = 1.0 if rope.factor <= 1 else 0.1 * math.log(rope.factor) + 1.0  # what engines apply by themselves
    if not math.isclose(rope.magnitude, usual, rel_tol=1e-7):
        pairs["rope.scaling.attn_factor"] = KeyValue.number(rope.magnitude / usual)
    return pairs


def rope_tensors(config: ModelConfig) -> dict[str, NDArray[np.float32]]:
    """Divisors of the plain frequencies, by the names of the tensors that engines read."""
    rope = config.rope
    if rope.type == "longrope":
        return {
            ROPE_LONG: np.asarray(rope.long_factor, np.float32),
            ROPE_SHORT: np.asarray(rope.short_factor, np.float32),
        }
    if rope.type not in ("llama3", "explicit"):
        return {}
    dim = config.rotary_dim
    plain = rope.theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    return {ROPE_FACTORS: (plain / rope.inverse_frequencies(dim).astype(np.float64)).astype(np.float32)}
