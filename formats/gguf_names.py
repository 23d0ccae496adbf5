"""How GGUF spells what a Hugging Face checkpoint holds: tensor names, families, the order of q and k rows.

llama.cpp rotates neighbouring pairs of a head in the ``llama`` family, where the checkpoint pairs the two halves of a
head. Its converter therefore stores the rows of q and k interleaved: row ``2 i + s`` of a head is the checkpoint's
row ``s * head_dim / 2 + i``. Reading such a file without undoing that gives a model that loads and talks nonsense.

Source: llama.cpp, gguf-py/gguf/tensor_mapping.py and conversion/llama.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "FAMILIES",
    "ROPE_FACTORS",
    "ROPE_LONG",
    "ROPE_SHORT",
    "Family",
    "gguf_name",
    "hf_name",
    "stored_row_order",
]

ROPE_FACTORS, ROPE_LONG, ROPE_SHORT = (
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
)
"""Tensors that no checkpoint has: what the rotary frequencies are divided by."""


@dataclass(frozen=True)
class Family:
    """One value of ``general.architecture``.

    Parameters
    ----------
    model_type, hf_class : str
        What config.json says for it.
    interleaved : bool
        Whether rows of q and k are stored interleaved.
    biases : frozenset of str
        Modules whose bias engines read; a file with any other is refused by them.
    names : mapping
        Modules that the family's checkpoints call otherwise than most: GGUF's name -> theirs.
    bare : mapping
        The same for whole names that do not end in a suffix: GGUF's name -> the checkpoint's.
    norm_offset : float
        What the file's norms are more than the checkpoint's.
    plain_norms : frozenset of str
        Ends of the checkpoint's names of norms that are the same in the file all the same.
    head : str
        ``any``; ``tied``: never a tensor of its own; ``own``: always.
    """

    model_type: str
    hf_class: str
    interleaved: bool
    biases: frozenset[str]
    names: Mapping[str, str] = field(default_factory=dict)
    bare: Mapping[str, str] = field(default_factory=dict)
    norm_offset: float = 0.0
    head: str = "any"
    plain_norms: frozenset[str] = frozenset()

    @cached_property
    def _checkpoint_names(self) -> dict[str, str]:
        return {**_MODULES, **self.names}

    @cached_property
    def _file_names(self) -> dict[str, str]:
        return {hf: gguf for gguf, hf in self._checkpoint_names.items()}


_QKV = frozenset({"attn_q", "attn_k", "attn_v"})
_ALL_LINEAR = _QKV | {"attn_output", "ffn_gate", "ffn_up", "ffn_down"}
_POST_NORMS = {
    "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.post_ffw_norm": "model.layers.{}.post_feedforward_layernorm",
}
_GEMMA = _POST_NORMS | {"blk.{}.ffn_norm": "model.layers.{}.pre_feedforward_layernorm"}
_EXPERTS = frozenset({"ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"})


_DELTA = {
    "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.attn_qkv": "model.layers.{}.linear_attn.in_proj_qkv",
    "blk.{}.attn_gate": "model.layers.{}.linear_attn.in_proj_z",
    "blk.{}.ssm_alpha": "model.layers.{}.linear_attn.in_proj_a",
    "blk.{}.ssm_beta": "model.layers.{}.linear_attn.in_proj_b",
    "blk.{}.ssm_ba": "model.layers.{}.linear_attn.in_proj_ba",
    "blk.{}.ssm_conv1d": "model.layers.{}.linear_attn.conv1d",
    "blk.{}.ssm_norm": "model.layers.{}.linear_attn.norm",
    "blk.{}.ssm_out": "model.layers.{}.linear_attn.out_proj",
}
_DELTA_BARE = {
    "blk.{}.ssm_a": "model.layers.{}.linear_attn.A_log",
    "blk.{}.ssm_dt.bias": "model.layers.{}.linear_attn.dt_bias",
}
_DELTA_NORMS = frozenset({"linear_attn.norm.weight"})


FAMILIES: dict[str, Family] = {
    # Mistral too, whose window is not stored, and Mixtral, which alone has a router.
    "llama": Family(
        "llama",
        "LlamaForCausalLM",
        True,
        _ALL_LINEAR,
        {"blk.{}.ffn_gate_inp": "model.layers.{}.block_sparse_moe.gate"},
    ),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM", False, _QKV),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", False, _QKV),
    "phi3": Family(
        "phi3",
        "Phi3ForCausalLM",
        False,
        frozenset(),
        {
            "blk.{}.attn_qkv": "model.layers.{}.self_attn.qkv_proj",
            "blk.{}.ffn_up": "model.layers.{}.mlp.gate_up_proj",
        },
    ),
    "gemma": Family("gemma", "GemmaForCausalLM", False, _QKV, norm_offset=1.0, head="tied"),
    "gemma2": Family("gemma2", "Gemma2ForCausalLM", False, _QKV, _GEMMA, norm_offset=1.0, head="tied"),
    "gemma3": Family("gemma3_text", "Gemma3ForCausalLM", False, _QKV, _GEMMA, norm_offset=1.0),
    "granite": Family("granite", "GraniteForCausalLM", True, _ALL_LINEAR),
    "seed_oss": Family(
        "seed_oss",
        "SeedOssForCausalLM",
        False,
        _QKV,
        {"blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm"},
    ),
    "smollm3": Family("smollm3", "SmolLM3ForCausalLM", True, _QKV),
    "olmo2": Family("olmo2", "Olmo2ForCausalLM", False, _QKV, _POST_NORMS, head="own"),
    "qwen2moe": Family("qwen2_moe", "Qwen2MoeForCausalLM", False, _QKV),
    "qwen3moe": Family("qwen3_moe", "Qwen3MoeForCausalLM", False, _QKV),
    "olmoe": Family("olmoe", "OlmoeForCausalLM", False, frozenset()),
    "deepseek2": Family(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        False,
        frozenset(),
        {
            "blk.{}.attn_q_a": "model.layers.{}.self_attn.q_a_proj",
            "blk.{}.attn_q_a_norm": "model.layers.{}.self_attn.q_a_layernorm",
            "blk.{}.attn_q_b": "model.layers.{}.self_attn.q_b_proj",
            "blk.{}.attn_kv_a_mqa": "model.layers.{}.self_attn.kv_a_proj_with_mqa",
            "blk.{}.attn_kv_a_norm": "model.layers.{}.self_attn.kv_a_layernorm",
            "blk.{}.attn_k_b": "model.layers.{}.self_attn.k_b_proj",
            "blk.{}.attn_v_b": "model.layers.{}.self_attn.v_b_proj",
            "blk.{}.ffn_gate_shexp": "model.layers.{}.mlp.shared_experts.gate_proj",
            "blk.{}.ffn_up_shexp": "model.layers.{}.mlp.shared_experts.up_proj",
            "blk.{}.ffn_down_shexp": "model.layers.{}.mlp.shared_experts.down_proj",
        },
        {"blk.{}.exp_probs_b.bias": "model.layers.{}.mlp.gate.e_score_correction_bias"},
    ),
    **{
        name: Family(
            model_type,
            hf_class,
            False,
            frozenset(),
            _DELTA,
            _DELTA_BARE,
            norm_offset=1.0,
            plain_norms=_DELTA_NORMS,
        )
        for name, model_type, hf_class in (
            ("qwen35", "qwen3_5_text", "Qwen3_5ForCausalLM"),
            ("qwen35moe", "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
            ("qwen3next", "qwen3_next", "Qwen3NextForCausalLM"),
        )
    },
    "gpt-oss": Family(
        "gpt_oss",
        "GptOssForCausalLM",
        False,
        _QKV | {"attn_output", "ffn_gate_inp"} | _EXPERTS,
        {
            "blk.{}.ffn_gate_inp": "model.layers.{}.mlp.router",
            "blk.{}.post_attention_norm": "model.layers.{}.post_attention_layernorm",
        },
        {"blk.{}.attn_sinks.weight": "model.layers.{}.self_attn.sinks"},
    ),
}

_MODULES: dict[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.{}.attn_norm": "model.layers.{}.input_layernorm",
    "blk.{}.attn_q": "model.layers.{}.self_attn.q_proj",
    "blk.{}.attn_k": "model.layers.{}.self_attn.k_proj",
    "blk.{}.attn_v": "model.layers.{}.self_attn.v_proj",
    "blk.{}.attn_output": "model.layers.{}.self_attn.o_proj",
    "blk.{}.attn_q_norm": "model.layers.{}.self_attn.q_norm",
    "blk.{}.attn_k_norm": "model.layers.{}.self_attn.k_norm",
    "blk.{}.ffn_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.ffn_gate": "model.layers.{}.mlp.gate_proj",
    "blk.{}.ffn_up": "model.layers.{}.mlp.up_proj",
    "blk.{}.ffn_down": "model.layers.{}.mlp.down_proj",
    "blk.{}.ffn_gate_inp": "model.layers.{}.mlp.gate",
    "blk.{}.ffn_gate_exps": "model.layers.{}.mlp.experts.gate_proj",
    "blk.{}.ffn_up_exps": "model.layers.{}.mlp.experts.up_proj",
    "blk.{}.ffn_down_exps": "model.layers.{}.mlp.experts.down_proj",
    "blk.{}.ffn_gate_inp_shexp": "model.layers.{}.mlp.shared_expert_gate",
    "blk.{}.ffn_gate_shexp": "model.layers.{}.mlp.shared_expert.gate_proj",
    "blk.{}.ffn_up_shexp": "model.layers.{}.mlp.shared_expert.up_proj",
    "blk.{}.ffn_down_shexp": "model.layers.{}.mlp.shared_expert.down_proj",
}
_ANY = Family("", "", False, frozenset())
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


def _translate(name: str, table: Mapping[str, str], whole: Mapping[str, str]) -> str | None:
    number = _LAYER.search(name)
    if number is not None and (found := whole.get(_LAYER.sub("{}", name, count=1))) is not None:
        return found.format(number[0])
    module, _, suffix = name.rpartition(".")
    layer = _LAYER.search(module)
    template = table.get(_LAYER.sub("{}", module, count=1))
    if template is None or suffix not in ("weight", "bias"):
        return None
    return f"{template.format(layer[0]) if layer else template}.{suffix}"


def hf_name(name: str, family: Family | None = None) -> str | None:
    """The checkpoint's name of a GGUF tensor; None where there is none.

    Parameters
    ----------
    name : str
    family : Family, optional
        For the names that only some families have.

    Examples
    --------
    >>> hf_name("blk.3.ffn_down.weight"), hf_name("rope_freqs.weight")
    ('model.layers.3.mlp.down_proj.weight', None)
    """
    family = family or _ANY
    return _translate(name, family._checkpoint_names, family.bare)


def gguf_name(name: str, family: Family | None = None) -> str | None:
    """GGUF's name of a checkpoint's tensor; None where there is none.

    Parameters
    ----------
    name : str
        The canonical one; of a routed expert that of the stack of all.
    family : Family, optional
        For the names that only some families have.

    Examples
    --------
    >>> gguf_name("model.layers.3.self_attn.q_proj.bias")
    'blk.3.attn_q.bias'
    """
    family = family or _ANY
    return _translate(name, family._file_names, {hf: gguf for gguf, hf in family.bare.items()})


def stored_row_order(rows: int, heads: int) -> NDArray[np.intp]:
    """Where each row of a checkpoint's q or k lies in an interleaved GGUF tensor.

    Parameters
    ----------
    rows : int
        ``heads * head_dim``.
    heads : int
        Query heads for q, key-value heads for k.

    Returns
    -------
    ndarray of intp, shape (rows,)
        ``stored[order]`` is the checkpoint's order.

    Examples
    --------
    >>> stored_row_order(8, 2).tolist()
    [0, 2, 1, 3, 4, 6, 5, 7]
    """
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).transpose(0, 2, 1).reshape(-1)
