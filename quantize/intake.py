"""Is this checkpoint what its config says? Every offender in one message, before any work.

Also settles the head. A checkpoint may tie it to the embedding (no head tensor, or an identical one): then it is stored
once. Where config.json says tied but a *different* head is present, the head counts, as in transformers since 5.0.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from trapetum.errors import CheckpointError, listed
from trapetum.models.architectures import Architecture, Role, text_config
from trapetum.models.config import parse_config
from trapetum.quantize.blocks import BLOCK_WEIGHTS, row_blocks
from trapetum.quantize.vocabulary import check_vocabulary
from trapetum.tensors import matrix_shape

if TYPE_CHECKING:
    from trapetum.formats.packed_ternary import AnyCheckpoint

__all__ = ["Head", "check_tensors"]


@dataclass(frozen=True)
class Head:
    """What was found about the output head.

    Parameters
    ----------
    duplicate : str or None
        A head tensor identical to the embedding, which is not stored a second time.
    tied : bool or None
        What config.json must say of ``tie_word_embeddings`` for the artifact to say what is stored; None: as it is.
    notes : tuple of str
    """

    duplicate: str | None = None
    tied: bool | None = None
    notes: tuple[str, ...] = ()


def check_tensors(source: AnyCheckpoint, architecture: Architecture) -> Head:
    """Compare names and shapes with the config and settle the head.

    Raises
    ------
    CheckpointError
        If tensors are missing or have another shape than the config promises.
    """
    if architecture.any_architecture:
        return Head()
    config = parse_config(source.config)
    found = architecture.index(source.names())
    head = _settle_head(source, found)
    faults = architecture.faults(config, {name: source.shape(name) for name in source.names()})
    if faults:
        untied = any(f.startswith("lm_head") and f.endswith("missing") for f in faults)
        raise CheckpointError(
            f"{source.path}: {listed(faults)}, as config.json promises",
            hint='If the embedding is the head, set "tie_word_embeddings": true in config.json.'
            if untied
            else "The checkpoint is incomplete, or config.json belongs to another one.",
        )
    embed = next((name for role, name in found.items() if role.kind == "embed"), None)
    tokenizer = source.tokenizer_file()
    if embed is not None and tokenizer is not None:
        notes = check_vocabulary(tokenizer, source.shape(embed)[0])
        head = replace(head, notes=(*head.notes, *notes))
    return head


def _settle_head(source: AnyCheckpoint, found: dict[Role, str]) -> Head:
    names = {role.kind: name for role, name in found.items() if role.kind in ("embed", "head")}
    stated = text_config(source.config).get("tie_word_embeddings")
    if "embed" not in names:
        return Head()
    if "head" not in names:
        if stated is None:
            note = (
                "config.json does not say whether the head is tied, or says both, and there is none: "
                "the embedding is the head"
            )
            return Head(tied=True, notes=(note,))
        return Head()
    if not stated:
        return Head()
    if _identical(source, names["embed"], names["head"]):
        note = f"{names['head']} equals {names['embed']} bit for bit and the two are tied: stored once"
        return Head(duplicate=names["head"], notes=(note,))
    note = (
        f"config.json says that {names['head']} is tied to {names['embed']}, but the two differ: "
        "both are stored, and the artifact's config.json says untied"
    )
    return Head(tied=False, notes=(note,))


def _identical(source: AnyCheckpoint, first: str, second: str) -> bool:
    """Whether two tensors hold the same bytes; stops at the first block that differs."""
    if source.shape(first) != source.shape(second) or source.dtype(first) != source.dtype(second):
        return False
    blocks: Iterable[slice] = row_blocks(*matrix_shape(source.shape(first)), BLOCK_WEIGHTS)
    for rows in blocks:
        a, b = (np.ascontiguousarray(source.load(n, rows).values).view(np.uint8) for n in (first, second))
        if not np.array_equal(a, b):
            return False
        source.release(first)
        source.release(second)
    return True
