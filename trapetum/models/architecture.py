"""One family of models: roles of tensor names, names of parts, the shapes that a config promises.

All of it follows from the list of :class:`~trapetum.models.modules.Module`; ``models.families`` holds the entries.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from trapetum.errors import CheckpointError, listed
from trapetum.models.modules import Module, Role, template_key

if TYPE_CHECKING:
    from trapetum.models.config import ModelConfig

__all__ = ["Architecture", "LayerTypes", "Place", "Section", "all_full"]

LayerTypes = Callable[[Mapping[str, Any], int], tuple[str, ...]]

# Tensors that code recomputes and that some exporters store anyway; skipped and listed.
_BUFFER = re.compile(r"(?:rotary_emb\.\w+|inv_freq|masked_bias|position_ids|num_batches_tracked|attn\.bias)$")
_MANY = 1_000_000  # tensors that are not even listed where a checkpoint has few
_UNUSED = ("buffer", "other", "linear")
# Roles of names outside the table, first match wins; only for --any-architecture.
_GUESSES = (
    ("bias", r"bias$"),
    ("norm", r"norm|\bln_"),
    ("router", r"router|mlp\.gate\.weight$"),
    ("head", r"lm_head|output\.weight$"),
    ("embed", r"embed|wte|wpe"),
    ("linear", r"weight$"),
)


class Section(Protocol):
    """Options of one block of a family (routed experts, latent attention ...), parsed from config.json."""

    @property
    def dimensions(self) -> Mapping[str, int]:
        """Symbolic dimensions that its modules use."""


@dataclass(frozen=True)
class Place:
    """Where the rows of a part lie.

    Parameters
    ----------
    name : str
        The checkpoint's name of the tensor.
    module : Module
    rows : slice, optional
        Rows of its matrix form; None for all of them.
    """

    name: str
    module: Module
    rows: slice | None


def all_full(given: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """Full attention in every layer."""
    return ("full_attention",) * layers


def _dense(config: ModelConfig, layer: int) -> tuple[str, str]:
    return "attention", "mlp"


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
    options : frozenset of str
        Keys of config.json that only some families heed (``models.config``).
    aliases : mapping
        The family's own spelling of a key -> the usual one.
    acts : mapping
        What it means by a value of ``hidden_act``, where that is not what others mean.
    layer_types : callable
        (config.json with defaults, number of layers) -> a type a layer; ``sliding_attention`` has the window, and
        rotary parameters may be given by type.
    blocks : callable
        (config, layer) -> names of the layer's mixer and feed-forward in ``runtime.blocks``.
    sections : mapping
        Name -> parser of config.json (with defaults) for what such blocks need; ``ModelConfig.sections``.
    rotary_key : str
        The key of config.json that says how many values of a head are rotated; ``head_dim`` where left out.
    embedding_scale : bool
        Embeddings are multiplied by the root of the hidden size.
    cbk : str, optional
        Magic of the ``.cbk`` that can hold the family.
    gguf : str, optional
        The family's ``general.architecture`` in GGUF files (``formats.gguf_names``).
    num_layers : int, optional
        Set by ``resolve``; tensors of layers beyond it (extra prediction heads) are ``other``.
    any_architecture : bool
        True for the stand-in that ``resolve`` gives for a family outside the table.
    """

    model_type: str
    classes: tuple[str, ...]
    modules: tuple[Module, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    options: frozenset[str] = frozenset()
    aliases: Mapping[str, str] = field(default_factory=dict)
    acts: Mapping[str, str] = field(default_factory=dict)
    layer_types: LayerTypes = all_full
    blocks: Callable[[ModelConfig, int], tuple[str, str]] = _dense
    sections: Mapping[str, Callable[[Mapping[str, Any]], Section]] = field(default_factory=dict)
    rotary_key: str = ""
    embedding_scale: bool = False
    cbk: str | None = None
    gguf: str | None = None
    num_layers: int | None = None
    any_architecture: bool = False

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised before the rotary embedding."""
        return any(m.part == "q_norm" for m in self.modules)

    @cached_property
    def _by_key(self) -> dict[str, tuple[Module, bool]]:
        """Name with ``#`` for numbers -> (module, whether it is the bias)."""
        return {
            template_key(m.name(0, 0, bias=bias))[0]: (m, bias)
            for m in self.modules
            for bias in (True, False)
        }

    @cached_property
    def _by_part(self) -> dict[str, Module]:
        return {m.part: m for m in reversed(self.modules)}

    @cached_property
    def _holders(self) -> dict[str, list[tuple[Module, tuple[str, ...], str]]]:
        """Part -> (module, dimensions of the rows before it, dimension of its rows), for each module that has it."""
        found: dict[str, list[tuple[Module, tuple[str, ...], str]]] = {}
        for module in self.modules:
            before: tuple[str, ...] = ()
            for part, size in module.parts:
                found.setdefault(part, []).append((module, before, size))
                before += (size,)
        return found

    def module(self, part: str) -> Module:
        """The module of a part, by its own name (``qkv``, not ``q``, where they are fused)."""
        return self._by_part[part]

    def role(self, name: str) -> Role:
        """What the tensor ``name`` is for; never raises.

        Examples
        --------
        >>> from trapetum.models.architectures import ARCHITECTURES
        >>> ARCHITECTURES["llama"].role("model.layers.3.self_attn.q_proj.weight")
        Role(kind='q', layer=3, expert=None, part='q')
        >>> ARCHITECTURES["llama"].role("layers.3.self_attn.q_proj.bias").kind
        'bias'
        """
        if _BUFFER.search(name):
            return Role("buffer")
        key, numbers = template_key(name)
        if key in self._by_key:
            module, bias = self._by_key[key]
            layer = numbers[0] if module.per_layer else None
            expert = numbers[1] if module.per_expert else None
            if self.num_layers is not None and layer is not None and layer >= self.num_layers:
                return Role("other", layer=layer)
            return Role("bias" if bias else module.kind, layer, expert, module.part)
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
        >>> from trapetum.models.architectures import ARCHITECTURES
        >>> ARCHITECTURES["llama"].tensor_name("q", 0, suffix="bias")
        'model.layers.0.self_attn.q_proj.bias'
        """
        return self.module(part).name(layer, expert, bias=suffix == "bias")

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
            if role.kind in _UNUSED or not role.part:
                continue
            if role in found:
                raise CheckpointError(f"tensors {found[role]} and {name} are the same part of the model")
            found[role] = name
        return found

    def locate(
        self,
        config: ModelConfig,
        names: Mapping[Role, str],
        part: str,
        layer: int | None = None,
        *,
        expert: int | None = None,
        bias: bool = False,
    ) -> Place | None:
        """Where a checkpoint stores a part: the tensor, and its rows where it shares it with others.

        Parameters
        ----------
        config : ModelConfig
        names : mapping of Role to str
            See :meth:`index`.
        part : str
        layer, expert : int, optional
        bias : bool
            Of the bias instead; its elements are counted as the rows of the matrix are.

        Returns
        -------
        Place, or None where the checkpoint has none.
        """
        for module, before, size in self._holders.get(part, ()):
            kind = "bias" if bias else module.kind
            name = names.get(Role(kind, layer, expert if module.per_expert else None, module.part))
            if name is None:
                continue
            if not module.holds and not module.stacked:
                return Place(name, module, None)
            start = sum(config.size(d) for d in before)
            if module.stacked:
                start += (expert or 0) * sum(config.size(d) for _, d in module.parts)
            return Place(name, module, slice(start, start + config.size(size)))
        return None

    def settled(self, names: Iterable[str] = ()) -> Architecture:
        """This family with one form of each group: the one that ``names`` has, else the first."""
        forms: dict[str, str] = {}
        for name in names:
            found = self._by_key.get(template_key(name)[0])
            if found is not None and found[0].form:
                group, _, form = found[0].form.partition("=")
                forms.setdefault(group, form)
        for module in self.modules:
            group, _, form = module.form.partition("=")
            forms.setdefault(group, form)
        kept = tuple(
            m for m in self.modules if m.form in ("", f"{(g := m.form.partition('=')[0])}={forms[g]}")
        )
        return self if len(kept) == len(self.modules) else replace(self, modules=kept)

    def places(self, config: ModelConfig) -> Iterator[tuple[Module, int | None, int | None]]:
        """(module, layer, expert) of every tensor that the config promises, a tied head too."""
        for module in self.modules:
            layers: Iterable[int | None] = range(config.num_hidden_layers) if module.per_layer else (None,)
            for layer in layers:
                if layer is not None and not module.where(config, layer):
                    continue
                experts: Iterable[int | None] = (
                    range(config.size("experts")) if module.per_expert else (None,)
                )
                for expert in experts:
                    yield module, layer, expert

    def _count(self, config: ModelConfig) -> int:
        """Tensors that the config promises, about."""
        experts = max((config.size("experts") for m in self.modules if m.per_expert), default=1)
        layers = config.num_hidden_layers
        return sum((layers if m.per_layer else 1) * (experts if m.per_expert else 1) for m in self.modules)

    def expected_shapes(self, config: ModelConfig, names: Iterable[str] = ()) -> dict[str, tuple[int, ...]]:
        """Every tensor that the config promises, under its canonical name.

        Biases are not among them (see :meth:`expected_biases`), nor is a tied head.

        Parameters
        ----------
        config : ModelConfig
        names : iterable of str
            Of the checkpoint, which settle the forms of storage.

        Returns
        -------
        dict of name to shape
        """
        untied = config.tie_word_embeddings is False
        return {
            module.name(layer, expert): tuple(config.size(d) for d in module.shape)
            for module, layer, expert in self.settled(names).places(config)
            if module.part != "head" or untied
        }

    def expected_biases(self, config: ModelConfig, names: Iterable[str] = ()) -> list[str]:
        """Canonical names of the biases that the config or the family promises."""
        return [
            module.name(layer, expert, bias=True)
            for module, layer, expert in self.settled(names).places(config)
            if module.bias == "always" or (module.bias and getattr(config, module.bias))
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
        promised_count = self.settled(shapes)._count(config)
        if promised_count > _MANY + 2 * len(shapes):
            return [f"config.json promises {promised_count:,} tensors, and there are {len(shapes):,}"]
        promised_names = [*self.expected_shapes(config, shapes), *self.expected_biases(config, shapes)]
        found = [f"{n} is missing" for n in promised_names if self.role(n) not in names]
        for role, name in names.items():
            module = self.module(role.part)
            promised = tuple(config.size(d) for d in module.shape)
            promised = promised[: 2 if module.stacked else 1] if role.kind == "bias" else promised
            if role.layer is not None and not module.where(config, role.layer):
                found.append(f"{name} is there, and that layer has no such part")
            elif tuple(shapes[name]) != promised:
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
