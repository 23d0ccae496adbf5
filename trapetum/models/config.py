"""config.json with every spelling normalised: what shapes, the forward pass and the exporters need.

Missing keys take the default that transformers has for the family (column ``defaults`` of the architecture
table); a key without a sensible default, a value of the wrong type, or an option that would change the
numbers and that we do not compute is an error that names the key. Nothing that matters is ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from trapetum.errors import CheckpointError, UnsupportedModelError
from trapetum.models.architectures import Architecture, Section, resolve, text_config
from trapetum.models.layer_types import SLIDING, rotary_layers
from trapetum.models.rope import Rope, parse_ropes

__all__ = ["ACTIVATIONS", "ModelConfig", "parse_config"]

ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "gelu")
"""Values of ``hidden_act`` that ``runtime.layers`` computes."""

_LIMIT = 2**31  # sizes and lengths stay below it in every model and every format
_MOST_LAYERS = 10_000  # a list has an entry for each
_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
_LEAST = 1e-6  # multipliers beyond it and its reciprocal leave float32
# Keys of ``Architecture.options`` that are numbers, which must not be 0.
_NUMBERS = frozenset(
    {"query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", *_MULTIPLIERS}
)


@dataclass(frozen=True)
class ModelConfig:
    """What config.json says, in one spelling.

    Parameters
    ----------
    architecture : Architecture
    hidden_size, intermediate_size, num_hidden_layers, vocab_size : int
    num_attention_heads, num_key_value_heads, head_dim : int
    rms_norm_eps : float
        Over the square of what multiplies the outputs of blocks (``residual_multiplier``), where a family has that: see
        ``embedding_scale``.
    layer_types : tuple of str
        See ``models.layer_types``.
    ropes : tuple of (Rope or None), one a layer
        None: no rotary embedding.
    rotary_dim : int
        Values of a head that are rotated, the first ones.
    tie_word_embeddings : bool, optional
        The head is the embedding; None where the file does not say: then it is if there is no head tensor. A head
        tensor that is there counts in any case (transformers since 5.0 does the same).
    windows : tuple of (int or None), one a layer
        Sliding window: a position sees itself and the ``window - 1`` before it.
    hidden_act : str
        One of :data:`ACTIVATIONS`.
    attention_scale : float, optional
        What multiplies attention scores; one over the root of ``head_dim`` where None.
    attention_softcap, logit_softcap : float, optional
        ``cap * tanh(x / cap)`` of attention scores, of logits.
    embedding_scale : float
        What multiplies embeddings. Where outputs of blocks are multiplied before they are added, the whole stream is
        kept over that number, and embeddings are too: norms see no difference but in ``rms_norm_eps``.
    logit_scale : float
        What multiplies logits; the final norm takes it in.
    multipliers : mapping of str to float
        Those that the file states, by its keys, where the family has them (Granite).
    sections : mapping
        Options of a family's own blocks, by name (``Architecture.sections``).
    attention_bias, mlp_bias : bool
        Whether biases are promised; those that are there are used in any case.
    max_position_embeddings : int, optional
        Longest context; None where the file does not say.
    dtype : str, optional
        As stated (``dtype`` or ``torch_dtype``); the tensors' own dtypes are what counts.
    bos_token_ids, eos_token_ids : tuple of int
    """

    architecture: Architecture
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    layer_types: tuple[str, ...]
    ropes: tuple[Rope | None, ...]
    rotary_dim: int
    tie_word_embeddings: bool | None
    windows: tuple[int | None, ...]
    hidden_act: str = "silu"
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    multipliers: Mapping[str, float] = field(default_factory=dict)
    sections: Mapping[str, Section] = field(default_factory=dict)
    attention_bias: bool = False
    mlp_bias: bool = False
    max_position_embeddings: int | None = None
    dtype: str | None = None
    bos_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()

    @property
    def rope(self) -> Rope:
        """The rotary embedding of the layers with full attention (of the first layer that has one, else)."""
        pairs = sorted(zip(self.layer_types, self.ropes), key=lambda pair: pair[0] == SLIDING)
        return next((rope for _, rope in pairs if rope is not None), Rope())

    @property
    def max_length(self) -> int | None:
        """Most positions of a text: dynamic scaling reaches beyond the trained length."""
        reach = self.max_position_embeddings
        stretched = reach is not None and self.rope.type == "dynamic"
        return int(reach * self.rope.factor) if reach is not None and stretched else reach

    @cached_property
    def dimensions(self) -> dict[str, int]:
        """The symbolic dimensions of the architecture table."""
        own: dict[str, int] = {}
        for section in self.sections.values():
            own |= section.dimensions
        return own | {
            "heads": self.num_attention_heads,
            "hidden": self.hidden_size,
            "intermediate": self.intermediate_size,
            "vocab": self.vocab_size,
            "head": self.head_dim,
            "query": self.num_attention_heads * self.head_dim,
            "key_value": self.num_key_value_heads * self.head_dim,
        }

    def size(self, dimension: str) -> int:
        """A symbolic dimension, or a sum of them (``"query+key_value"``)."""
        return sum(
            self.dimensions[part] if not part.isdigit() else int(part) for part in dimension.split("+")
        )


def parse_config(config: Mapping[str, Any]) -> ModelConfig:
    """Normalise the content of config.json.

    Parameters
    ----------
    config : mapping

    Raises
    ------
    CheckpointError
        If a key is missing or has an impossible value; names file and key.
    UnsupportedModelError
        If the architecture, the activation or the rope type is not known.

    Examples
    --------
    >>> c = parse_config({"model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    ...                   "vocab_size": 100, "num_hidden_layers": 1, "num_attention_heads": 4,
    ...                   "rope_parameters": {"rope_theta": 5e5}})
    >>> c.head_dim, c.num_key_value_heads, c.rope.theta, c.tie_word_embeddings
    (16, 4, 500000.0, None)
    """
    arch = resolve(config)
    text = text_config(config)
    aliased = {key: text[said] for said, key in arch.aliases.items() if text.get(said) is not None}
    own = {**{k: v for k, v in text.items() if k not in arch.aliases}, **aliased}
    stated = {k: v for k, v in own.items() if v is not None}
    given = {**arch.defaults, **own}  # an explicit null wins over a family's default
    given = {k: v for k, v in given.items() if v is not None}
    act = given.get("hidden_act", "silu")
    act = arch.acts.get(act, act) if isinstance(act, str) else act
    if act not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"config.json: hidden_act is {act!r}; {', '.join(ACTIVATIONS)} are supported"
        )
    if given.get("use_bidirectional_attention"):
        raise UnsupportedModelError(
            "config.json: use_bidirectional_attention is set; models that see the future are not supported"
        )
    hidden, heads = _integer(given, "hidden_size"), _integer(given, "num_attention_heads")
    layers = _integer(given, "num_hidden_layers")
    if layers > _MOST_LAYERS:
        raise CheckpointError(
            f"config.json: num_hidden_layers is {layers}; at most {_MOST_LAYERS} are expected"
        )
    kv_heads = _integer(given, "num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads is {heads}, not a multiple of num_key_value_heads {kv_heads}"
        )
    if "head_dim" not in given and hidden % heads:
        raise CheckpointError(
            f"config.json: hidden_size {hidden} is not a multiple of {heads} heads and head_dim is missing"
        )
    head_dim = _integer(given, "head_dim", default=hidden // heads)
    types = arch.layer_types(given, layers)
    window = _integer(given, "sliding_window") if "sliding_window" in given and SLIDING in types else None
    rotary_dim = _rotary_dim(given, arch, head_dim)
    heeded = {k: _number(given, k, zero=False) for k in arch.options & set(given) & _NUMBERS}
    multipliers = {k: heeded[k] for k in _MULTIPLIERS if k in heeded}
    for key, value in multipliers.items():
        if not _LEAST <= value <= 1 / _LEAST:
            raise CheckpointError(
                f"config.json: {key} is {value:g}; {_LEAST:g} to {1 / _LEAST:g} are expected"
            )
    residual = multipliers.get("residual_multiplier", 1.0)
    embedding = math.sqrt(hidden) if arch.embedding_scale else multipliers.get("embedding_multiplier", 1.0)
    scale = multipliers.get("attention_multiplier")
    if "query_pre_attn_scalar" in heeded:
        scale = heeded["query_pre_attn_scalar"] ** -0.5
    dtype = stated.get("dtype", stated.get("torch_dtype"))
    return ModelConfig(
        architecture=arch,
        hidden_size=hidden,
        intermediate_size=_integer(given, "intermediate_size"),
        num_hidden_layers=layers,
        vocab_size=_integer(given, "vocab_size"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_number(given, "rms_norm_eps", default=1e-6) / residual**2,
        layer_types=types,
        ropes=_ropes(given, arch, rotary_dim, types),
        rotary_dim=rotary_dim,
        tie_word_embeddings=_flag(given, "tie_word_embeddings"),
        windows=tuple(window if t == SLIDING else None for t in types),
        hidden_act=act,
        attention_scale=scale,
        attention_softcap=heeded.get("attn_logit_softcapping"),
        logit_softcap=heeded.get("final_logit_softcapping"),
        embedding_scale=embedding / residual,
        logit_scale=1 / multipliers.get("logits_scaling", 1.0),
        multipliers=multipliers,
        sections={name: parse(given) for name, parse in arch.sections.items()},
        attention_bias=bool(_flag(given, "attention_bias")),
        mlp_bias=bool(_flag(given, "mlp_bias")),
        max_position_embeddings=_integer(given, "max_position_embeddings")
        if "max_position_embeddings" in given
        else None,
        dtype=str(dtype).removeprefix("torch.") if dtype is not None else None,
        bos_token_ids=_ids(stated, "bos_token_id"),
        eos_token_ids=_ids(stated, "eos_token_id"),
    )


def _rotary_dim(given: Mapping[str, Any], arch: Architecture, head_dim: int) -> int:
    """Rotated values of a head."""
    stated = given.get("rope_parameters") or given.get("rope_scaling")
    inner = stated.get("partial_rotary_factor") if isinstance(stated, Mapping) else None
    part = _number(
        {"partial_rotary_factor": given.get("partial_rotary_factor", 1.0) if inner is None else inner},
        "partial_rotary_factor",
    )
    if part != 1 and "partial_rotary_factor" not in arch.options:
        raise UnsupportedModelError(
            f"config.json: partial_rotary_factor is {part:g}; only 1 is supported in the family {arch.model_type}"
        )
    if not 0 < part <= 1:
        raise CheckpointError(f"config.json: partial_rotary_factor is {part:g}; it is between 0 and 1")
    return int((_integer(given, arch.rotary_key) if arch.rotary_key else head_dim) * part)


def _ropes(
    given: Mapping[str, Any], arch: Architecture, dim: int, types: tuple[str, ...]
) -> tuple[Rope | None, ...]:
    """The rotary embedding of each layer; ``no_rope_layers`` names those without by a 0."""
    ropes = parse_ropes(given, dim, types, local="rope_local_base_freq" in arch.options)
    if "no_rope_layers" not in arch.options:
        return ropes
    return tuple(rope if has else None for rope, has in zip(ropes, rotary_layers(given, len(types))))


def _integer(given: Mapping[str, Any], key: str, *, default: int | None = None) -> int:
    value = given.get(key, default)
    if value is None:
        raise CheckpointError(f"config.json: key {key!r} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < _LIMIT:
        raise CheckpointError(f"config.json: {key} is {value!r}; a positive integer is expected")
    return value


def _number(given: Mapping[str, Any], key: str, *, default: float = math.nan, zero: bool = True) -> float:
    value = given.get(key, default)
    usable = not isinstance(value, bool) and isinstance(value, int | float) and 0 <= value < math.inf
    if not usable or (value == 0 and not zero):
        expected = "a number >= 0" if zero else "a positive number"
        raise CheckpointError(f"config.json: {key} is {value!r}; {expected} is expected")
    return float(value)


def _flag(given: Mapping[str, Any], key: str) -> bool | None:
    value = given.get(key)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"config.json: {key} is {value!r}; true or false is expected")
    return value


def _ids(given: Mapping[str, Any], key: str) -> tuple[int, ...]:
    value = given.get(key, [])
    values = list(value) if isinstance(value, list | tuple) else [value]
    if any(isinstance(v, bool) or not isinstance(v, int) for v in values):
        raise CheckpointError(
            f"config.json: {key} is {value!r}; an integer or a list of integers is expected"
        )
    return tuple(v for v in values if v >= 0)  # -1 stands for "none" in some old configs
