"""Routed experts: their options in config.json, and the forms in which checkpoints store their weights.

=========  =======================================================  ==================================================
form       tensors of a layer                                       who has it
=========  =======================================================  ==================================================
single     ``experts.E.gate_proj.weight``, up, down                 most checkpoints (Mixtral says w1, w3, w2)
stacked    ``experts.gate_proj.weight`` [experts, rows, in], ...    what a GGUF, and gpt-oss turned to rows, are read as
fused      ``experts.gate_up_proj`` [experts, 2 rows, in], gate     transformers 5 in memory, Qwen3.5 on disk
           before up
=========  =======================================================  ==================================================

Every form is stored and quantized as it is; ``Architecture.locate`` finds the rows of one expert in any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trapetum.errors import CheckpointError
from trapetum.models.modules import Module

if TYPE_CHECKING:
    from trapetum.models.config import ModelConfig

__all__ = [
    "Routing",
    "expert_modules",
    "expert_routing",
    "is_dense",
    "is_sparse",
    "shared_modules",
    "sparse_blocks",
]

SECTION = "experts"
"""Name of the options in ``ModelConfig.sections``."""


@dataclass(frozen=True)
class Routing:
    """How tokens find their experts.

    Parameters
    ----------
    experts : int
        Routed ones in a layer.
    chosen : int
        Experts a token.
    expert_size : int
        Width of one.
    sparse : tuple of bool
        Which layers have routed experts; the others have a plain feed-forward.
    router : str
        Key of ``runtime.routers.ROUTERS``.
    normalise : bool
        Weights of the chosen experts are made to add up to 1.
    scale : float
        What the weights are multiplied by at last.
    shared_size : int
        Width of the shared expert that every token takes; 0 where there is none.
    groups, chosen_groups : int
        Experts are chosen from some groups only.
    activation : str
        ``gated`` (the model's own, times up) or ``clamped`` (gpt-oss).
    alpha, limit : float
        Of the clamped activation.
    """

    experts: int
    chosen: int
    expert_size: int
    sparse: tuple[bool, ...]
    router: str = "softmax"
    normalise: bool = True
    scale: float = 1.0
    shared_size: int = 0
    groups: int = 1
    chosen_groups: int = 1
    activation: str = "gated"
    alpha: float = 1.702
    limit: float = 7.0

    @property
    def dimensions(self) -> Mapping[str, int]:
        """``experts``, ``expert`` (width of one) and ``shared``."""
        return {"experts": self.experts, "expert": self.expert_size, "shared": self.shared_size}


def is_sparse(config: ModelConfig, layer: int) -> bool:
    """Whether a layer has routed experts."""
    section = config.sections[SECTION]
    return isinstance(section, Routing) and section.sparse[layer]


def is_dense(config: ModelConfig, layer: int) -> bool:
    """Whether a layer has a plain feed-forward."""
    return not is_sparse(config, layer)


def sparse_blocks(config: ModelConfig, layer: int) -> tuple[str, str]:
    """Grouped-query attention, and experts or a plain feed-forward."""
    return "attention", "experts" if is_sparse(config, layer) else "mlp"


def expert_modules(
    prefix: str,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    *,
    stem: str | None = None,
    bias: str = "",
    first: str = "single",
) -> tuple[Module, ...]:
    """Weights of routed experts, in every form.

    Parameters
    ----------
    prefix : str
        What stands before ``experts.``: ``model.layers.{layer}.mlp.``.
    names : (gate, up, down)
        Of a single expert.
    stem : str, optional
        What stands before ``experts.`` in the other forms.
    bias : str
        See :class:`Module`.
    first : str
        The form that counts where a checkpoint has none.
    """
    one, all_of = f"{prefix}experts.{{expert}}.", f"{stem or prefix}experts."
    gate, up, down = names
    rows, back = ("expert", "hidden"), ("hidden", "expert")
    many: dict[str, Any] = {"stacked": True, "where": is_sparse, "bias": bias}
    single: dict[str, Any] = {"form": "experts=single", "where": is_sparse, "bias": bias}
    stacked, fused = many | {"form": "experts=stacked"}, many | {"form": "experts=fused"}
    bare = fused | {"suffix": "", "bias_suffix": "_bias"}
    halves = (("expert_gate", "expert"), ("expert_up", "expert"))
    forms = {
        "single": (
            Module("expert_gate", "gate", one + gate, rows, reads="expert_gate", **single),
            Module("expert_up", "up", one + up, rows, reads="expert_gate", **single),
            Module("expert_down", "down", one + down, back, **single),
        ),
        "stacked": (
            _stack("gate", all_of + "gate_proj", rows, reads="expert_gate", **stacked),
            _stack("up", all_of + "up_proj", rows, reads="expert_gate", **stacked),
            _stack("down", all_of + "down_proj", back, reads="expert_down", **stacked),
        ),
        "fused": (
            Module(
                "experts_gate_up", "gate_up", all_of + "gate_up_proj", ("experts", "expert+expert", "hidden"),
                holds=halves, reads="expert_gate", **bare,
            ),
            _stack("down", all_of + "down_proj", back, part="experts_down_bare", reads="expert_down", **bare),
        ),
    }  # fmt: skip
    return tuple(m for form in sorted(forms, key=lambda f: f != first) for m in forms[form])


def _stack(kind: str, template: str, shape: tuple[str, str], *, part: str = "", **options: Any) -> Module:
    return Module(
        part or f"experts_{kind}",
        kind,
        template,
        ("experts", *shape),
        holds=((f"expert_{kind}", shape[0]),),
        **options,
    )


def shared_modules(
    prefix: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> tuple[Module, ...]:
    """Weights of the expert that every token takes; ``prefix`` ends with its name and a dot."""
    gate, up, down = names
    options: dict[str, Any] = {"where": is_sparse}
    return (
        Module("shared_gate", "gate", prefix + gate, ("shared", "hidden"), reads="shared_gate", **options),
        Module("shared_up", "up", prefix + up, ("shared", "hidden"), reads="shared_gate", **options),
        Module("shared_down", "down", prefix + down, ("hidden", "shared"), **options),
    )


def expert_routing(
    *,
    size: str = "moe_intermediate_size",
    router: str = "softmax",
    normalise: bool | None = None,
    shared: str | None = None,
    activation: str = "gated",
) -> Callable[[Mapping[str, Any]], Routing]:
    """A parser of config.json for one family.

    Parameters
    ----------
    size : str
        The key that holds the width of an expert.
    router : str
        See :class:`Routing`.
    normalise : bool, optional
        What the family always does; by ``norm_topk_prob`` where left out.
    shared : str, optional
        The key that holds the width of the shared expert, or (``n_shared_experts``) how many experts wide it is.
    activation : str
        See :class:`Routing`.
    """

    def parse(given: Mapping[str, Any]) -> Routing:
        experts = _count(given, "num_local_experts", "num_experts", "n_routed_experts")
        chosen = _count(given, "num_experts_per_tok", "num_experts_per_token")
        width = _count(given, size)
        if chosen > experts:
            raise CheckpointError(f"config.json: num_experts_per_tok is {chosen} of {experts} experts")
        groups = _count(given, "n_group", default=1)
        if experts % groups:
            raise CheckpointError(
                f"config.json: n_group is {groups}, which does not divide {experts} experts"
            )
        extra = 0 if shared is None or not given.get(shared) else _count(given, shared)
        flag = given.get("norm_topk_prob", False)
        if not isinstance(flag, bool):
            raise CheckpointError(f"config.json: norm_topk_prob is {flag!r}; true or false is expected")
        return Routing(
            experts,
            chosen,
            width,
            sparse=_sparse_layers(given),
            router=router,
            normalise=flag if normalise is None else normalise,
            scale=_positive(given, "routed_scaling_factor", 1.0),
            shared_size=extra * width if shared == "n_shared_experts" else extra,
            groups=groups,
            chosen_groups=_count(given, "topk_group", default=groups),
            activation=activation,
            alpha=_positive(given, "swiglu_alpha", 1.702),
            limit=_positive(given, "swiglu_limit", 7.0),
        )

    return parse


def _sparse_layers(given: Mapping[str, Any]) -> tuple[bool, ...]:
    """Which layers have experts: all but those that one of the two families of keys excepts."""
    layers = _count(given, "num_hidden_layers")
    step = _count(given, "decoder_sparse_step", default=1)
    every, first = _count(given, "moe_layer_freq", default=1), given.get("first_k_dense_replace", 0)
    only = given.get("mlp_only_layers", [])
    if isinstance(first, bool) or not isinstance(first, int) or not isinstance(only, list | tuple):
        raise CheckpointError(
            "config.json: first_k_dense_replace or mlp_only_layers is not what it should be"
        )
    return tuple(
        i not in only and (i + 1) % step == 0 and i >= first and i % every == 0 for i in range(layers)
    )


def _count(given: Mapping[str, Any], *keys: str, default: int | None = None) -> int:
    key = next((k for k in keys if given.get(k) is not None), keys[0])
    value = given.get(key, default)
    if value is None:
        raise CheckpointError(f"config.json: key {' or '.join(map(repr, keys))} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"config.json: {key} is {value!r}; a positive integer is expected")
    return value


def _positive(given: Mapping[str, Any], key: str, default: float) -> float:
    value = given.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise CheckpointError(f"config.json: {key} is {value!r}; a positive number is expected")
    return float(value)
