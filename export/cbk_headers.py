"""Which .cbk holds a model: the magic, the header's values, and everything that no field can say.

An architecture names the family of magics that fits it (column ``cbk``); one row of ``_FAMILIES`` turns a config into
header values, another names what the runtimes of that family do not compute. All reasons why a model does not fit end
in one error, before any work. What a runtime computes differently though the file is right becomes a note.

Of the DeepSeek magics the stored tensors choose where nothing is said: additive experts mean CBKV, codebooks of more
than 16 entries in the shared experts CBKE or CBKS, anything else CBKD or CBKR.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from trapetum.errors import RecipeError, UnsupportedModelError
from trapetum.formats.cbk import padded_vocab
from trapetum.formats.cbk_deepseek import HEAD_8BIT, SHARED_8BIT
from trapetum.formats.cbk_layouts import CBK_LAYOUTS
from trapetum.formats.cbk_records import CbkHeader
from trapetum.models.architectures import Role
from trapetum.models.config import ModelConfig
from trapetum.models.deepseek import LATENT, LatentOptions
from trapetum.models.experts import SECTION, Routing

__all__ = ["Stored", "build_header"]

_ENTRIES = 16
_PADDED = 256
_EPS = 1e-6  # of DeepSeek's latent norms, which have no field of their own


@dataclass(frozen=True)
class Stored:
    """What the source stores of a part: entries of its codebook, or the number of additive codebooks; 0: neither."""

    entries: int = 0
    additive: int = 0


@dataclass
class _Fit:
    """Magic, header values, reasons against it, notes."""

    magic: str
    values: dict[str, int | float]
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def build_header(
    config: ModelConfig,
    tensors: Iterable[str],
    names: Mapping[Role, str],
    stored: Mapping[Role, Stored],
    magic: str | None = None,
) -> tuple[CbkHeader, list[str]]:
    """The header of the file that holds a model, and what a person should know.

    Parameters
    ----------
    config : ModelConfig
    tensors : iterable of str
        All names of the source.
    names : mapping of Role to str
        ``Architecture.index`` of them.
    stored : mapping of Role to Stored
        Of its quantized tensors.
    magic : str, optional
        The one that is wanted, where a family has several.

    Raises
    ------
    UnsupportedModelError
        With every reason why no .cbk holds the model.
    RecipeError
        If the wanted magic is not one of the family's.
    """
    arch = config.architecture
    if arch.cbk not in CBK_LAYOUTS:
        norms = " (its queries and keys are normed)" if arch.qk_norm else ""
        raise UnsupportedModelError(
            f"no .cbk layout holds the architecture {arch.model_type}{norms}", hint="Export to hf instead."
        )
    if magic is not None and arch.cbk in ("CBK3", "CBKG") and magic != arch.cbk:
        raise RecipeError(f"magic is {magic!r}; for this model {arch.cbk} is allowed")
    fit = _FAMILIES[arch.cbk](config, names, stored, magic)
    layout = CBK_LAYOUTS[fit.magic]
    chosen = {name: fit.values[name] for name, _ in layout.fields}
    faults = layout.violations(chosen) + fit.faults + _shared_faults(config, tensors)
    if faults:
        raise UnsupportedModelError(
            f"{layout.magic} cannot hold this model: {'; '.join(faults)}", hint="Export to hf instead."
        )
    dim = 2 * layout.sizes(chosen)[layout.inv_freq]
    notes = list(fit.notes)
    if config.vocab_size % _PADDED:
        notes.append(f"the vocabulary of {config.vocab_size} is padded to {padded_vocab(config.vocab_size)}")
    return CbkHeader(layout, chosen, config.rope.inverse_frequencies(dim)), notes


def _shared_faults(config: ModelConfig, tensors: Iterable[str]) -> list[str]:
    """What no runtime of the format computes."""
    faults = []
    if any(".q_norm." in name or ".k_norm." in name for name in tensors):
        faults.append("normed queries and keys are not computed by the runtimes of .cbk")
    if None in config.ropes:
        faults.append("layers without rotary embedding are not computed by the runtimes of .cbk")
    elif len(set(config.ropes)) > 1:
        faults.append("layers with rotary embeddings of their own are not computed by the runtimes of .cbk")
    rope = config.rope
    if rope.type in ("dynamic", "longrope"):
        faults.append(
            f"rope type {rope.type} depends on the length of the text; the file holds one set of frequencies"
        )
    elif rope.magnitude != 1.0:
        faults.append(
            f"rope type {rope.type} scales cosine and sine by {rope.magnitude:.4f}, which the runtimes of .cbk do not"
        )
    return faults


def _bias_faults(names: Iterable[Role], allowed: tuple[str, ...]) -> list[str]:
    extra = sorted({role.part for role in names if role.kind == "bias" and role.part not in allowed})
    return [f"there is no place for a bias of {part}" for part in extra]


_QUERY_BIASES = ("q", "k", "v", "qkv")


def _grouped_values(config: ModelConfig) -> dict[str, int | float]:
    """Header values of models with grouped-query attention."""
    return {
        "n_layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "n_heads": config.num_attention_heads,
        "n_kv": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "inter": config.intermediate_size,
        "vocab": padded_vocab(config.vocab_size),
        "eps": config.rms_norm_eps,
        "rope_base": config.rope.theta,
    }


def _windows(config: ModelConfig) -> list[int]:
    """Windows that are shorter than the context."""
    reach = config.max_position_embeddings
    return sorted({w for w in config.windows if w is not None and (reach is None or w < reach)})


def _grouped_faults(config: ModelConfig, act: str) -> list[str]:
    faults = []
    if config.hidden_act != act:
        faults.append(f"hidden_act is {config.hidden_act}, not {act}")
    if config.rotary_dim != config.head_dim:
        faults.append(
            f"{config.rotary_dim} of {config.head_dim} values of a head are rotated, not all of them"
        )
    return faults


def _llama(
    config: ModelConfig, names: Mapping[Role, str], stored: Mapping[Role, Stored], magic: str | None
) -> _Fit:
    biased = any(role.kind == "bias" and role.part in _QUERY_BIASES for role in names)
    linear = config.rope.type == "linear"
    fit = _Fit(
        "CBK3",
        {
            **_grouped_values(config),
            "rope_scale": config.rope.factor if linear else 1.0,
            "has_bias": int(biased),
        },
    )
    fit.faults = _bias_faults(names, _QUERY_BIASES)
    if windows := _windows(config):
        fit.faults.append(
            f"a sliding window of {windows[0]} positions is not computed by the runtimes of .cbk"
        )
    fit.faults += _grouped_faults(config, "silu")
    scaled = (config.attention_scale, config.attention_softcap, config.logit_softcap)
    if any(value is not None for value in scaled) or config.embedding_scale != 1.0:
        fit.faults.append(
            "scaled embeddings or scores and soft caps are not computed by the runtimes of CBK3"
        )
    return fit


def _gemma(
    config: ModelConfig, names: Mapping[Role, str], stored: Mapping[Role, Stored], magic: str | None
) -> _Fit:
    fit = _Fit(
        "CBKG",
        {
            **_grouped_values(config),
            "attn_softcap": config.attention_softcap or 0.0,
            "final_softcap": config.logit_softcap or 0.0,
        },
    )
    fit.faults = _bias_faults(names, ()) + _grouped_faults(config, "gelu_pytorch_tanh")
    scale = config.attention_scale
    if scale is not None and abs(scale * config.head_dim**0.5 - 1) > 1e-6:
        fit.faults.append(
            f"query_pre_attn_scalar is {scale**-2:g}, not head_dim {config.head_dim}, which the runtimes of CBKG take"
        )
    if windows := _windows(config):
        fit.notes.append(
            f"the runtimes of .cbk compute no sliding window: right for texts of up to {windows[0]} tokens"
        )
    return fit


def _deepseek(
    config: ModelConfig, names: Mapping[Role, str], stored: Mapping[Role, Stored], magic: str | None
) -> _Fit:
    latent, routing = config.sections[LATENT], config.sections[SECTION]
    if not isinstance(latent, LatentOptions) or not isinstance(routing, Routing):
        raise TypeError(f"{config.architecture.model_type} has no options of latent attention and experts")
    shared = routing.shared_size // routing.expert_size
    sigmoid = routing.router == "sigmoid_groups"
    first = routing.sparse.index(True) if True in routing.sparse else config.num_hidden_layers
    values: dict[str, int | float] = {
        "n_layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "n_heads": latent.heads,
        "kv_lora": latent.kv_lora,
        "nope": latent.nope,
        "rope": latent.rope,
        "v_head_dim": latent.value,
        "inter_pad": padded_vocab(config.intermediate_size),
        "moe_inter_pad": padded_vocab(routing.expert_size),
        "n_routed": routing.experts,
        "n_shared": shared,
        "top_k": routing.chosen,
        "vocab": padded_vocab(config.vocab_size),
        "first_k_dense": first,
        "q_lora": latent.q_lora,
        "n_group": routing.groups,
        "topk_group": routing.chosen_groups,
        "sigmoid": int(sigmoid),
        "eps": config.rms_norm_eps,
        "softmax_scale": latent.scale,
        "routed_scale": routing.scale,
    }
    chosen, choice, notes = _deepseek_magic(latent.q_lora > 0, stored, magic)
    fit = _Fit(chosen, values | choice, _bias_faults(names, ()), notes)
    if not all(routing.sparse[first:]):
        fit.faults.append("dense layers after the first sparse one have no place")
    if sigmoid and not latent.q_lora:
        fit.faults.append("a sigmoid router without q_lora_rank has no magic: CBKD means softmax")
    if not latent.interleaved:
        fit.faults.append("rope_interleave is false; the runtimes of .cbk rotate pairs of neighbours")
    if config.hidden_act != "silu":
        fit.faults.append(f"hidden_act is {config.hidden_act}, not silu")
    if not routing.normalise:
        fit.notes.append(
            "norm_topk_prob is false, and the runtimes of .cbk always make the weights of the chosen experts add up "
            "to routed_scaling_factor: their logits differ from the model's, whatever the file says"
        )
    if routing.router == "softmax_groups" and routing.chosen_groups < routing.groups:
        fit.notes.append(
            "topk_method is group_limited_greedy, and the runtimes of .cbk choose among all experts after a softmax"
        )
    if config.rms_norm_eps != _EPS:
        fit.notes.append(
            f"rms_norm_eps is {config.rms_norm_eps:g}, and the file has no other for the norms of latents, {_EPS:g}"
        )
    return fit


def _deepseek_magic(
    q_lora: bool, stored: Mapping[Role, Stored], wanted: str | None
) -> tuple[str, dict[str, int | float], list[str]]:
    """The magic, its own header field, notes.

    By default what is stored chooses: additive experts CBKV, shared experts with more than 16 values a row CBKE or
    CBKS. A head with more is not enough: recipes give it 8 bits by default, and files have 4-bit heads as a rule.
    """
    experts = [s for role, s in stored.items() if role.part.startswith("expert")]
    wide = {
        SHARED_8BIT: any(
            s.entries > _ENTRIES for role, s in stored.items() if role.part.startswith("shared_")
        ),
        HEAD_8BIT: any(s.entries > _ENTRIES for role, s in stored.items() if role.kind == "head"),
    }
    counts = Counter(s.additive for s in experts if s.additive in (2, 3))
    usual = "CBKR" if q_lora else "CBKD"
    mixed = "CBKS" if q_lora else "CBKE"
    magic = wanted or ("CBKV" if counts and q_lora else mixed if wide[SHARED_8BIT] else usual)
    allowed = (usual, mixed, *(("CBKV",) if q_lora else ()))
    if magic == "MTP1" and q_lora:
        return magic, {"tied_embed": 1, "tied_head": 1}, []
    if magic not in allowed:
        raise RecipeError(f"magic is {magic!r}; for this model {', '.join(allowed)} are allowed")
    notes = []
    if magic == "CBKV":
        count, most = counts.most_common(1)[0] if counts else (2, 0)
        if most < len(experts):
            notes.append(
                f"{len(experts) - most} of {len(experts)} expert tensors become {count} additive codebooks"
            )
        return magic, {"experts_avq": count}, notes
    if counts:
        notes.append(f"{magic} has no additive experts: they are fitted to {_ENTRIES} values a row")
    if magic == usual:
        return magic, {}, notes
    stored_flags = sum(bit for bit, found in wide.items() if found)
    return magic, {"prec_flags": stored_flags or SHARED_8BIT | HEAD_8BIT}, notes


_FAMILIES: dict[str, Callable[[ModelConfig, Mapping[Role, str], Mapping[Role, Stored], str | None], _Fit]] = {
    "CBK3": _llama,
    "CBKG": _gemma,
    "CBKD": _deepseek,
    "CBKR": _deepseek,
}
"""``Architecture.cbk`` -> how its models fit."""
