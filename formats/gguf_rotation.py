"""``prism.hadamard.*``: how a GGUF says that a rotation was folded into its weights (``trapetum.rotation``).

=====================  ===============  =============================================================================
key                    type             value
=====================  ===============  =============================================================================
version                UINT32           2 where ``token_embd.weight`` is rotated and is the head too, else 1
block_size             UINT32           power of two that divides every width
transform              STRING           ``normalized-sylvester-walsh-hadamard``
axis                   STRING           ``input-last-dimension``
sign_mode              STRING           ``explicit``, or ``identity``: all signs are +1
sign_widths            ARRAY INT32      distinct row lengths, in the order of the signs
sign_values            ARRAY INT32      +1 and -1, one after the other
weight_names           ARRAY STRING     matrices that multiply a rotated activation
inverse_weight_names   ARRAY STRING     ``token_embd.weight``, where its rows are rotated
tied_output            BOOL             true in version 2
gdn_v_grouped          BOOL             true where columns of ``ssm_out`` are in the checkpoint's order
=====================  ===============  =============================================================================

Source: the Prism fork of llama.cpp and the readers that follow it; they refuse other types and values, and so do we.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trapetum.errors import FormatError, UnsupportedModelError
from trapetum.formats.gguf_delta import DELTA_FAMILIES
from trapetum.formats.gguf_values import KeyValue, ValueType
from trapetum.formats.strict_json import shown
from trapetum.rotation import HadamardRotation

__all__ = ["FoldedRotation", "read_rotation", "rotation_pairs"]

_PREFIX = "prism.hadamard."
_EMBEDDING = "token_embd.weight"
_FIXED = {"transform": "normalized-sylvester-walsh-hadamard", "axis": "input-last-dimension"}


@dataclass(frozen=True)
class FoldedRotation:
    """A rotation and the GGUF names of the tensors that it is folded into, the embedding among them.

    ``delta_grouped``: columns of ``ssm_out`` are in the checkpoint's order (``formats.gguf_delta``).
    """

    rotation: HadamardRotation
    names: frozenset[str]
    delta_grouped: bool = False


def rotation_pairs(
    rotation: HadamardRotation, names: Sequence[str], *, tied: bool, delta_grouped: bool = False
) -> dict[str, KeyValue]:
    """The keys of a file.

    Parameters
    ----------
    rotation : HadamardRotation
    names : sequence of str
        GGUF names of the tensors that it is folded into.
    tied : bool
        Whether the embedding is the head too.
    delta_grouped : bool
        Whether columns of ``ssm_out`` are not where engines expect them otherwise.
    """
    widths = sorted(rotation.signs)
    folded = [name for name in names if name != _EMBEDDING]
    embedding = len(folded) < len(names)
    pairs = {
        "version": KeyValue(2 if embedding and tied else 1, ValueType.UINT32),
        "block_size": KeyValue(rotation.block_size, ValueType.UINT32),
        **{key: KeyValue(value, ValueType.STRING) for key, value in _FIXED.items()},
        "sign_mode": KeyValue("explicit", ValueType.STRING),
        "sign_widths": KeyValue(widths, ValueType.ARRAY, ValueType.INT32),
        "sign_values": KeyValue(
            np.concatenate([rotation.signs[w] for w in widths]).astype(np.int32),
            ValueType.ARRAY,
            ValueType.INT32,
        ),
        "weight_names": KeyValue(folded, ValueType.ARRAY, ValueType.STRING),
    }
    if embedding:
        pairs["inverse_weight_names"] = KeyValue([_EMBEDDING], ValueType.ARRAY, ValueType.STRING)
        if tied:
            pairs["tied_output"] = KeyValue(True, ValueType.BOOL)
    if delta_grouped:
        pairs["gdn_v_grouped"] = KeyValue(True, ValueType.BOOL)
    return {_PREFIX + key: value for key, value in pairs.items()}


def read_rotation(
    path: Path, metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> FoldedRotation | None:
    """The rotation of a file; None where it states none.

    Parameters
    ----------
    path : Path
        For messages.
    metadata : mapping
    shapes : mapping of GGUF name to shape

    Raises
    ------
    UnsupportedModelError
        If it is of a kind that is not known here: taken for another one, every answer would be wrong.
    FormatError
        If the keys contradict each other or the tensors.
    """
    stated = {k.removeprefix(_PREFIX): v for k, v in metadata.items() if k.startswith(_PREFIX)}
    if not stated:
        return None
    family = str(metadata.get("general.architecture"))
    allowed = {**{key: (value,) for key, value in _FIXED.items()}, "version": (1, 2)}
    for key, values in {
        **allowed,
        "sign_mode": ("explicit", "identity"),
        "gdn_v_grouped": (None, False, True)[: 3 if family in DELTA_FAMILIES else 2],
    }.items():
        if stated.get(key) not in values:
            raise UnsupportedModelError(
                f"{path}: the weights are rotated, and {_PREFIX}{key} is {shown(stated.get(key))}; "
                f"{' or '.join(shown(v) for v in values if v is not None)} can be read"
            )
    names, inverse = (list(stated.get(key, ())) for key in ("weight_names", "inverse_weight_names"))
    tied = stated.get("tied_output", False)
    problems = [
        (not names, "weight_names is empty"),
        (bool(set(inverse) - {_EMBEDDING}), f"inverse_weight_names holds more than {_EMBEDDING}"),
        (_EMBEDDING in names, f"{_EMBEDDING} stands in weight_names"),
        (tied != (stated["version"] == 2), f"version {stated['version']} with tied_output {tied}"),
        (
            tied and (not inverse or "output.weight" in shapes),
            "tied_output without a rotated embedding as the head",
        ),
    ]
    problems += [(n not in shapes, f"the file has no tensor {shown(n)}") for n in (*names, *inverse)]
    for wrong, what in problems:
        if wrong:
            raise FormatError(f"{path}: {_PREFIX.rstrip('.')}: {what}")
    widths = {shapes[name][-1] for name in (*names, *inverse)}
    try:
        rotation = HadamardRotation(int(stated["block_size"]), _signs(stated, widths))
    except (KeyError, ValueError, TypeError) as problem:
        raise FormatError(f"{path}: {_PREFIX.rstrip('.')} is not usable: {problem}") from None
    if missing := widths - set(rotation.signs):
        raise FormatError(f"{path}: {_PREFIX.rstrip('.')} has no signs for rows of {sorted(missing)}")
    grouped = stated.get("gdn_v_grouped") is True
    return FoldedRotation(rotation, frozenset([*names, *inverse]), grouped)


def _signs(stated: Mapping[str, Any], widths: set[int]) -> dict[int, Any]:
    if stated["sign_mode"] == "identity":
        return {width: np.ones(width, np.int8) for width in widths}
    listed, values = [int(w) for w in stated["sign_widths"]], np.asarray(stated["sign_values"])
    if len(set(listed)) != len(listed) or min(listed, default=0) < 1 or sum(listed) != len(values):
        raise ValueError(f"{len(values)} signs for the widths {listed}")
    ends = np.cumsum(listed)
    if not np.isin(values, (-1, 1)).all():
        raise ValueError("a sign is neither +1 nor -1")
    return {w: values[end - w : end].astype(np.int8) for w, end in zip(listed, ends)}
