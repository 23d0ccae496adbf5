"""The one table of architectures: which tensors a model has, what each is for, and which shape it must have.

An entry lists its *modules*; a module is a part name, a role, a name template and a symbolic shape. From that
list follow the role of any tensor name, the name of any tensor, and the shapes that a config promises. A new
family is one entry (and the layers that it needs in ``runtime``). Quantize asks for roles and shapes, export
for names, the runtime for both; none of them looks at names itself.

Names are accepted with or without ``model.`` and inside a multimodal wrapper (``language_model.model.``,
``model.language_model.``); tensors outside the text model get the role ``other``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from trapetum.errors import CheckpointError, UnsupportedModelError, listed

if TYPE_CHECKING:
    from trapetum.models.config import ModelConfig

__all__ = ["ARCHITECTURES", "Architecture", "Module", "Role", "resolve", "text_config"]

Windows = Callable[[Mapping[str, Any], int], tuple[int | None, ...]]

# Everything that may stand before the text model's own names.
_PREFIX = r"^(?:model\.language_model\.|language_model\.model\.|language_model\.|model\.)?"
# Tensors that code recomputes and that some exporters store anyway; skipped and listed.
_BUFFER = re.compile(r"(?:rotary_emb\.\w+|inv_freq|masked_bias|position_ids|num_batches_tracked|attn\.bias)$")


@dataclass(frozen=True)
class Role:
    """What a tensor is for.

    Parameters
    ----------
    kind : str
        ``embed q k v o gate up down head`` (matrices), ``norm``, ``bias``, ``router``, ``buffer``
        (recomputable, not a weight), ``linear`` (a weight of an architecture outside the table) or ``other``
        (not part of the text model).
    layer, expert : int, optional
        Position in the stack.
    part : str
        The module within the layer: for a matrix its kind, for a norm or a bias which one
        (``attn_norm ffn_norm q_norm k_norm final_norm``; ``q`` of ``q_proj.bias``).
    """

    kind: str
    layer: int | None = None
    expert: int | None = None
    part: str = ""


@dataclass(frozen=True)
class Module:
    """One named weight of an architecture.

    Parameters
    ----------
    part, kind : str
        See :class:`Role`.
    template : str
        Name without suffix; ``{layer}`` and ``{expert}`` stand for numbers.
    shape : tuple of str
        Dimensions by the names of ``ModelConfig.dimensions``.
    bias : str
        What promises a bias: a flag of :class:`ModelConfig`, ``always``, or nothing (it may still be there, and
        is then used).
    """

    part: str
    kind: str
    template: str
    shape: tuple[str, ...]
    bias: str = ""

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """Matches every accepted name of this module; groups ``layer``, ``expert``, ``suffix``."""
        body = re.escape(self.template.removeprefix("model."))
        for number in ("layer", "expert"):
            body = body.replace(re.escape("{" + number + "}"), rf"(?P<{number}>\d+)")
        return re.compile(_PREFIX + body + r"\.(?P<suffix>weight|bias)$")


def _no_window(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    return (None,) * layers


def _every_layer(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    return (config.get("sliding_window"),) * layers


def _switched(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """Qwen: off unless ``use_sliding_window``; then by ``layer_types``, else by ``max_window_layers``."""
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    types = config.get("layer_types")
    if types is None:
        first = config.get("max_window_layers", 28)
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    if len(types) != layers or set(types) - {"sliding_attention", "full_attention"}:
        raise UnsupportedModelError(
            "config.json: layer_types must name sliding_attention or full_attention "
            f"for each of {layers} layers"
        )
    return tuple(window if t == "sliding_attention" else None for t in types)


@dataclass(frozen=True)
class Architecture:
    """One family of models.

    Parameters
    ----------
    model_type : str
        Key of the table, as config.json spells it.
    classes : tuple of str
        Values of ``architectures`` that mean this family.
    modules : tuple of Module
    defaults : mapping
        What a missing key of config.json means (transformers' own defaults where they differ between
        families).
    windows : callable
        Sliding window of each layer, from the config.
    cbk : str, optional
        Magic of the ``.cbk`` that can hold the family.
    gguf : str, optional
        The family's ``general.architecture`` in GGUF files (``formats.gguf_names``).
    num_layers : int, optional
        Set by :func:`resolve`; tensors of layers beyond it (extra prediction heads) are ``other``.
    any_architecture : bool
        True for the stand-in that :func:`resolve` gives for a family outside the table.
    """

    model_type: str
    classes: tuple[str, ...]
    modules: tuple[Module, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    windows: Windows = _no_window
    cbk: str | None = None
    gguf: str | None = None
    num_layers: int | None = None
    any_architecture: bool = False

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised head by head before the rotary embedding."""
        return any(m.part == "q_norm" for m in self.modules)

    def role(self, name: str) -> Role:
        """What the tensor ``name`` is for; never raises.

        Examples
        --------
        >>> ARCHITECTURES["llama"].role("model.layers.3.self_attn.q_proj.weight")
        Role(kind='q', layer=3, expert=None, part='q')
        >>> ARCHITECTURES["llama"].role("layers.3.self_attn.q_proj.bias").kind
        'bias'
        """
        if _BUFFER.search(name):
            return Role("buffer")
        for module in self.modules:
            if found := module.pattern.match(name):
                numbers = {k: int(v) for k, v in found.groupdict().items() if k != "suffix" and v is not None}
                if self.num_layers is not None and numbers.get("layer", -1) >= self.num_layers:
                    return Role("other", layer=numbers["layer"])
                kind = "bias" if found["suffix"] == "bias" else module.kind
                return Role(kind, part=module.part, **numbers)
        if self.any_architecture:
            for kind, marks in _GUESSES:
                if re.search(marks, name):
                    return Role(kind)
        return Role("other")

    def tensor_name(
        self, part: str, layer: int | None = None, *, expert: int | None = None, suffix: str = "weight"
    ) -> str:
        """The canonical checkpoint name of a part.

        Examples
        --------
        >>> ARCHITECTURES["llama"].tensor_name("q", 0, suffix="bias")
        'model.layers.0.self_attn.q_proj.bias'
        """
        template = next(m.template for m in self.modules if m.part == part)
        return f"{template.format(layer=layer, expert=expert)}.{suffix}"

    def index(self, names: Iterable[str]) -> dict[Role, str]:
        """The checkpoint's own name of each tensor of the text model, by role.

        Raises
        ------
        CheckpointError
            If two names mean the same tensor (``model.norm.weight`` and ``norm.weight``).
        """
        found: dict[Role, str] = {}
        for name in names:
            role = self.role(name)
            if role.kind in ("buffer", "other", "linear") or not role.part:
                continue
            if role in found:
                raise CheckpointError(f"tensors {found[role]} and {name} are the same part of the model")
            found[role] = name
        return found

    def expected_shapes(self, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Every tensor that the config promises, under its canonical name.

        Biases are not among them (see :meth:`expected_biases`), nor is a tied head.

        Returns
        -------
        dict of name to shape
        """
        shapes: dict[str, tuple[int, ...]] = {}
        for module in self.modules:
            if module.part == "head" and config.tie_word_embeddings is not False:
                continue
            shape = tuple(config.dimensions[d] for d in module.shape)
            for layer in range(config.num_hidden_layers) if "{layer}" in module.template else (None,):
                shapes[self.tensor_name(module.part, layer)] = shape
        return shapes

    def expected_biases(self, config: ModelConfig) -> list[str]:
        """Canonical names of the biases that the config or the family promises."""
        return [
            self.tensor_name(module.part, layer, suffix="bias")
            for module in self.modules
            if module.bias == "always" or (module.bias and getattr(config, module.bias))
            for layer in range(config.num_hidden_layers)
        ]

    def faults(self, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Where a checkpoint's tensors are not what its config promises.

        Parameters
        ----------
        config : ModelConfig
        shapes : mapping of name to shape
            Every tensor of the checkpoint, under its own name.

        Returns
        -------
        list of str
            One clause each, the missing ones first; empty for an architecture outside the table.

        Raises
        ------
        CheckpointError
            See :meth:`index`.
        """
        if self.any_architecture:
            return []
        names = self.index(shapes)
        promised_names = [*self.expected_shapes(config), *self.expected_biases(config)]
        found = [f"{n} is missing" for n in promised_names if self.role(n) not in names]
        modules = {m.part: m for m in self.modules}
        for role, name in names.items():
            promised = tuple(config.dimensions[d] for d in modules[role.part].shape)
            promised = promised[:1] if role.kind == "bias" else promised
            if tuple(shapes[name]) != promised:
                found.append(f"{name} is {list(shapes[name])}, not {list(promised)}")
        return found

    def check_tensors(self, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ``CheckpointError`` with all :meth:`faults` (the first few spelled out), if there are any."""
        found = self.faults(config, shapes)
        if not found:
            return
        untied = f"{self.tensor_name('head')} is missing" in found
        raise CheckpointError(
            f"the tensors are not what config.json promises: {listed(found)}",
            hint='if the embedding is the head, set "tie_word_embeddings": true in config.json'
            if untied
            else "the checkpoint is incomplete, or config.json belongs to another one",
        )


def _llama(
    *, qk_norm: bool = False, qkv_bias: str = "", o_bias: str = "", mlp_bias: str = ""
) -> tuple[Module, ...]:
    """Modules of the Llama lineage; every entry of the table that differs by a norm or a bias says so here."""
    attn, mlp = "model.layers.{layer}.self_attn.", "model.layers.{layer}.mlp."
    modules = [
        Module("embed", "embed", "model.embed_tokens", ("vocab", "hidden")),
        Module("attn_norm", "norm", "model.layers.{layer}.input_layernorm", ("hidden",)),
        Module("q", "q", attn + "q_proj", ("query", "hidden"), qkv_bias),
        Module("k", "k", attn + "k_proj", ("key_value", "hidden"), qkv_bias),
        Module("v", "v", attn + "v_proj", ("key_value", "hidden"), qkv_bias),
        Module("o", "o", attn + "o_proj", ("hidden", "query"), o_bias),
        Module("ffn_norm", "norm", "model.layers.{layer}.post_attention_layernorm", ("hidden",)),
        Module("gate", "gate", mlp + "gate_proj", ("intermediate", "hidden"), mlp_bias),
        Module("up", "up", mlp + "up_proj", ("intermediate", "hidden"), mlp_bias),
        Module("down", "down", mlp + "down_proj", ("hidden", "intermediate"), mlp_bias),
        Module("final_norm", "norm", "model.norm", ("hidden",)),
        Module("head", "head", "lm_head", ("vocab", "hidden")),
    ]
    if qk_norm:
        modules += [
            Module("q_norm", "norm", attn + "q_norm", ("head",)),
            Module("k_norm", "norm", attn + "k_norm", ("head",)),
        ]
    return tuple(modules)


ARCHITECTURES: dict[str, Architecture] = {
    a.model_type: a
    for a in (
        Architecture(
            "llama",
            ("LlamaForCausalLM",),
            _llama(qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias"),
            cbk="CBK3",
            gguf="llama",
        ),
        Architecture(
            "mistral",
            ("MistralForCausalLM",),
            _llama(),
            {"num_key_value_heads": 8, "sliding_window": 4096},
            windows=_every_layer,
            cbk="CBK3",
            gguf="llama",
        ),
        Architecture(
            "qwen2",
            ("Qwen2ForCausalLM",),
            _llama(qkv_bias="always"),
            {"sliding_window": 4096},
            windows=_switched,
            cbk="CBK3",
            gguf="qwen2",
        ),
        Architecture(
            "qwen3",
            ("Qwen3ForCausalLM",),
            _llama(qk_norm=True, qkv_bias="attention_bias", o_bias="attention_bias"),
            {"head_dim": 128, "sliding_window": 4096},
            windows=_switched,
            gguf="qwen3",
        ),
    )
}

# Roles of names outside the table, first match wins; only for --any-architecture.
_GUESSES = (
    ("bias", r"bias$"),
    ("norm", r"norm|\bln_"),
    ("router", r"router|mlp\.gate\.weight$"),
    ("head", r"lm_head|output\.weight$"),
    ("embed", r"embed|wte|wpe"),
    ("linear", r"weight$"),
)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of config.json that describes the language model (``text_config`` of a multimodal one)."""
    nested = config.get("text_config")
    if not isinstance(nested, Mapping):
        return config
    shared = {k: config[k] for k in ("tie_word_embeddings", "eos_token_id", "bos_token_id") if k in config}
    return {**shared, **nested}


def resolve(config: Mapping[str, Any], *, any_architecture: bool = False) -> Architecture:
    """Find the architecture of a config.

    Parameters
    ----------
    config : mapping
        Content of config.json.
    any_architecture : bool
        Give a stand-in that guesses roles from names instead of refusing an unknown family.

    Raises
    ------
    CheckpointError
        If the config names no architecture at all.
    UnsupportedModelError
        If it names one outside the table.
    """
    text = text_config(config)
    listed = text.get("architectures") or []
    classes = [str(c) for c in ([listed] if isinstance(listed, str) else listed)]
    model_type = text.get("model_type")
    layers = text.get("num_hidden_layers")
    for arch in ARCHITECTURES.values():
        if any(c in arch.classes for c in classes) or (not classes and model_type == arch.model_type):
            return replace(arch, num_layers=layers if isinstance(layers, int) else None)
    if any_architecture:
        return Architecture(str(model_type), tuple(classes), _llama(), any_architecture=True)
    if not classes and not model_type:
        raise CheckpointError(
            "config.json: keys 'architectures' and 'model_type' are both missing",
            hint="add the one that the model's authors published",
        )
    known = ", ".join(c for a in ARCHITECTURES.values() for c in a.classes)
    raise UnsupportedModelError(
        f"config.json: architecture {', '.join(classes) or model_type!r} is not known; known are {known}",
        hint="--any-architecture quantizes it by tensor shapes (artifact and hf export only)",
    )
