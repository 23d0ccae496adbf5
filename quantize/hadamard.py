"""Which weights of a model take a Hadamard rotation, and which rotation it is.

A rotation is folded into the ternary tensors of a plan (``trapetum.rotation`` holds the mathematics). It is bound to
what engines that know such files can undo: a few architectures, matrices that multiply an activation, and the
embedding, by the inverse. The block is the largest of 1024, 512, 256 and 128 that divides every folded width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from trapetum.errors import RecipeError, UnsupportedModelError
from trapetum.models.architectures import Architecture
from trapetum.quantize.ternary import Ternary
from trapetum.rotation import BLOCK_SIZES, HadamardRotation

if TYPE_CHECKING:
    from trapetum.quantize.plan import PlanRow

__all__ = ["ARCHITECTURES", "ROLES", "rotate_rows"]

ARCHITECTURES = (
    "llama",
    "mistral",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
)
"""Families of our table whose rotated GGUF files are read somewhere (mistral is stored as llama)."""

ROLES = ("q", "k", "v", "qkv", "o", "gate", "up", "down", "head", "embed")


def rotate_rows(
    rows: Sequence[PlanRow], architecture: Architecture, seed: int
) -> tuple[tuple[PlanRow, ...], HadamardRotation, list[str]]:
    """Mark the ternary tensors that are folded.

    Parameters
    ----------
    rows : sequence of PlanRow
        Of the whole plan, fallbacks applied.
    architecture : Architecture
    seed : int
        Seed of the signs.

    Returns
    -------
    rows : tuple of PlanRow
    rotation : HadamardRotation
    notes : list of str
        Ternary tensors that stay as they are, and why.

    Raises
    ------
    UnsupportedModelError
        If no engine undoes a rotation in this architecture.
    RecipeError
        If no tensor can be rotated.
    """
    if architecture.any_architecture or architecture.model_type not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"hadamard: rotated models of architecture {architecture.model_type} run nowhere; "
            f"allowed are {', '.join(ARCHITECTURES)}",
            hint="Leave --hadamard out.",
        )
    smallest = BLOCK_SIZES[-1]
    ternary = [r for r in rows if isinstance(r.scheme, Ternary)]
    chosen = {r.name for r in ternary if r.role.kind in ROLES and r.shape[-1] % smallest == 0}
    if not chosen:
        raise RecipeError(
            f"hadamard: no ternary tensor of this plan has rows of a multiple of {smallest} weights",
            hint="Leave --hadamard out.",
        )
    rotation = HadamardRotation.for_widths({r.shape[-1] for r in rows if r.name in chosen}, seed)
    left = [f"{r.name} ({r.role.kind}, rows of {r.shape[-1]})" for r in ternary if r.name not in chosen]
    notes = [f"hadamard: block {rotation.block_size}, {len(chosen)} tensors rotated"]
    if left:
        notes.append(f"hadamard: not rotated, as no engine would undo it: {', '.join(left)}")
    marked = (
        replace(r, scheme=replace(r.scheme, rotated=True))
        if r.name in chosen and isinstance(r.scheme, Ternary)
        else r
        for r in rows
    )
    return tuple(marked), rotation, notes
