"""How importance matrices name the weights of a checkpoint: as llama.cpp names the tensors that it multiplies.

Experts of a layer are rows of one stack there; some weights that a checkpoint has as one tensor are two, and a few
read other inputs than the checkpoint's, so that nothing can be said of them.
"""

from __future__ import annotations

import re

from trapetum.formats.gguf_names import FAMILIES, gguf_name, hf_name

__all__ = ["is_known", "stored_name", "written_names"]

_PREFIX = re.compile(r"^(?:model\.language_model\.|language_model\.model\.|language_model\.|model\.)?")
_EXPERTS = re.compile(r"^blk\.(\d+)\.ffn_(gate|up|down)_(exps|shexp)\.weight$")
# Of the language model alone: draft layers and towers have layers and experts of the same names.
_HF_EXPERT = re.compile(r"^layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight$")
# The columns of ssm_out lie in another order in most files, k_b is multiplied from its other side.
_OTHER_INPUTS = re.compile(r"\.(linear_attn\.out_proj|self_attn\.[kv]_b_proj)\.")
_HF_STACK = re.compile(
    r"^layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.(gate|up|down|gate_up)_proj(\.weight)?$"
)
_HF_SHARED = re.compile(r"^layers\.(\d+)\.mlp\.shared_experts?\.(gate|up|down)_proj\.weight$")
_EXPERT_PARTS = {
    "gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down",
}  # fmt: skip
# What a checkpoint may have as one tensor and engines have as two: part of its name, and of theirs.
_APART = (
    (".experts.gate_up_proj", ".ffn_gate_exps.", ".ffn_up_exps."),
    (".linear_attn.in_proj_qkvz.", ".attn_qkv.", ".attn_gate."),
)


def stored_name(name: str) -> tuple[str, int | None]:
    """Where a file has the importance of a weight.

    Parameters
    ----------
    name : str
        The checkpoint's own name.

    Returns
    -------
    (GGUF name, expert)
        None for a stack of all experts; the name itself where engines have no such tensor.

    Examples
    --------
    >>> stored_name("model.layers.2.mlp.experts.7.up_proj.weight")
    ('blk.2.ffn_up_exps.weight', 7)
    """
    bare = _PREFIX.sub("", name).replace(".in_proj_qkvz.", ".in_proj_qkv.")  # the same inputs
    if found := _HF_STACK.match(bare):
        return f"blk.{found[1]}.ffn_{found[2].partition('_')[0]}_exps.weight", None
    if found := _HF_EXPERT.match(bare):
        part = _EXPERT_PARTS.get(found[3])
        if part is not None:
            return f"blk.{found[1]}.ffn_{part}_exps.weight", int(found[2])
    if found := _HF_SHARED.match(bare):
        return f"blk.{found[1]}.ffn_{found[2]}_shexp.weight", 0
    usual = bare if bare.startswith("lm_head.") else f"model.{bare}"
    return gguf_name(usual) or _family_name(usual) or name, 0


def written_names(name: str) -> list[tuple[str, int | None]]:
    """(GGUF name, expert) of every tensor that engines have for a checkpoint's weight; nothing where they have none."""
    key, expert = stored_name(name)
    if key == name:
        return []
    apart = next(((one, two) for mark, one, two in _APART if mark in name and one in key), None)
    return [(key, expert)] if apart is None else [(key, expert), (key.replace(*apart), expert)]


def is_known(name: str) -> bool:
    """Whether some family has a tensor of this GGUF name."""
    families = (None, *FAMILIES.values())
    return bool(_EXPERTS.match(name)) or any(hf_name(name, family) is not None for family in families)


def _family_name(name: str) -> str | None:
    """The name that some family has for a weight, where its inputs in the engine are those of the checkpoint."""
    if _OTHER_INPUTS.search(name):
        return None
    return next((found for f in FAMILIES.values() if (found := gguf_name(name, f))), None)
