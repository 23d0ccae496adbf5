"""One named weight of an architecture, and what a tensor of a checkpoint is for.

A :class:`Module` is a line of an architecture's list: a part of the model, the name under which checkpoints store
it, its shape, and where it occurs. Three forms of storage are data as well:

* *fused*: one tensor holds the rows of several parts one after the other (``holds``): ``qkv_proj`` is q, k and v.
* *stacked*: one tensor ``[experts, rows, in_features]`` holds a part of every routed expert (``stacked``).
* *either*: checkpoints of a family come with single experts or with stacked ones (``form``, ``GROUP=FORM``): the
  form whose names a checkpoint has counts, the first one where it has none.

Consumers ask for parts (``Architecture.locate``) and never see the difference.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trapetum.models.config import ModelConfig

__all__ = ["MATRIX_KINDS", "Module", "Role", "Where", "template_key"]

Where = Callable[["ModelConfig", int], bool]

MATRIX_KINDS = ("q", "k", "v", "o", "qkv", "kv", "gate", "up", "down", "gate_up")
"""Kinds that a recipe's ``linear`` group means; every other kind is kept unless a rule names it."""

_PREFIX = re.compile(r"^(?:model\.language_model\.|language_model\.model\.|language_model\.|model\.)?")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True)
class Role:
    """What a tensor is for.

    Parameters
    ----------
    kind : str
        ``embed head`` and those of :data:`MATRIX_KINDS` (matrices), ``norm``, ``bias``, ``router``, ``vector`` (other
        small parameters, never quantized), ``buffer`` (recomputable, not a weight), ``linear`` (a weight of an
        architecture outside the table) or ``other`` (not part of the text model).
    layer, expert : int, optional
        Position in the stack; the routed expert, where its tensor is its own.
    part : str
        The module within the layer: for a matrix most often its kind (``expert_gate`` of an expert, ``shared_gate``
        of a shared one), for a norm or a bias which one (``attn_norm ffn_norm q_norm k_norm final_norm``; ``q`` of
        ``q_proj.bias``).
    """

    kind: str
    layer: int | None = None
    expert: int | None = None
    part: str = ""

    @property
    def routed(self) -> bool:
        """Whether it belongs to routed experts, one or all of them."""
        return self.part.startswith("expert")


def _everywhere(config: ModelConfig, layer: int) -> bool:
    return True


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
        Dimensions by the names of ``ModelConfig.dimensions``; ``a+b`` is a sum.
    bias : str
        What promises a bias: a flag of :class:`ModelConfig`, ``always``, or nothing (it may still be there, and
        is then used).
    where : callable
        (config, layer) -> whether a layer has it.
    holds : tuple of (part, dimension)
        The parts whose rows it holds one after the other, where they are several.
    reads : str
        The part under which calibration sees its input; its own where left out. Modules of one layer that name the
        same part read the same activations.
    stacked : bool
        The first dimension counts routed experts.
    form : str
        ``GROUP=FORM``: one of several forms in which checkpoints store the same parts.
    offset : float
        Added to the stored values: 1 for norms that store their weight less one.
    suffix, bias_suffix : str
        What follows the template.
    """

    part: str
    kind: str
    template: str
    shape: tuple[str, ...]
    bias: str = ""
    where: Where = _everywhere
    holds: tuple[tuple[str, str], ...] = ()
    reads: str = ""
    stacked: bool = False
    form: str = ""
    offset: float = 0.0
    suffix: str = ".weight"
    bias_suffix: str = ".bias"

    @property
    def per_layer(self) -> bool:
        """Whether every layer may have one."""
        return "{layer}" in self.template

    @property
    def per_expert(self) -> bool:
        """Whether every routed expert has a tensor of its own."""
        return "{expert}" in self.template

    @property
    def input(self) -> str:
        """The part under which calibration sees its input."""
        return self.reads or self.part

    @property
    def parts(self) -> tuple[tuple[str, str], ...]:
        """(part, dimension) of the rows that it holds."""
        return self.holds or ((self.part, self.shape[1] if self.stacked else self.shape[0]),)

    def name(self, layer: int | None, expert: int | None = None, *, bias: bool = False) -> str:
        """The checkpoint's name."""
        suffix = self.bias_suffix if bias else self.suffix
        return self.template.format(layer=layer, expert=expert) + suffix


def template_key(name: str) -> tuple[str, list[int]]:
    """A tensor's name without what may stand before the text model's own names, ``#`` for its numbers; the numbers.

    Examples
    --------
    >>> template_key("model.layers.3.mlp.experts.17.up_proj.weight")
    ('layers.#.mlp.experts.#.up_proj.weight', [3, 17])
    """
    bare = _PREFIX.sub("", name)
    numbers = [int(n) for n in _NUMBER.findall(bare)]
    return _NUMBER.sub("#", bare), numbers
