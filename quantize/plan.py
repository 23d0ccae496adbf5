"""The plan: one row a tensor, made from names, shapes and the config before any weight is read.

``make_plan`` resolves the architecture, has the checkpoint checked against its config (``intake``) and gives each
tensor its scheme. ``survey`` then reads the weights once and fills in ``wide``; from there on every stored byte is
known. What the plan promises is what the job writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from trapetum.errors import UnsupportedModelError
from trapetum.models.architectures import Architecture, Role, resolve
from trapetum.quantize.blocks import MemoryBudget, memory_budget, usable_threads
from trapetum.quantize.intake import check_tensors
from trapetum.quantize.recipe import DEFAULT_RULES, Recipe
from trapetum.quantize.schemes import Keep, Scheme
from trapetum.tensors import matrix_shape

if TYPE_CHECKING:
    from trapetum.formats.checkpoint import Checkpoint

__all__ = ["Plan", "PlanRow", "as_float", "make_plan"]

# What k-means works on as stored; other float types are widened or narrowed to float32 block by block.
NATIVE = ("bfloat16", "float16", "float32")
FLOATS = (*NATIVE, "float64", "float8_e4m3fn", "float8_e5m2")


def as_float(block: NDArray[Any]) -> NDArray[Any]:
    """A block in a dtype that schemes take: unchanged if bfloat16, float16 or float32, else float32."""
    if block.dtype.name in NATIVE:
        return block
    with np.errstate(
        over="ignore"
    ):  # float64 beyond float32 becomes infinity, which the scan refuses by name
        return block.astype(np.float32)


@dataclass(frozen=True)
class PlanRow:
    """What happens to one tensor.

    Parameters
    ----------
    name : str
        The checkpoint's own name.
    file : str
        Name of the file that holds it.
    shape : tuple of int
    dtype : dtype
        As stored.
    role : Role
    scheme : Scheme
    why : str
        The rule or the property that decided, in words.
    wide : bool
        Whether the wide variant of the layout is needed; known after the scan.
    """

    name: str
    file: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    role: Role
    scheme: Scheme
    why: str
    wide: bool = False

    @property
    def quantized(self) -> bool:
        """Whether anything is done to the values."""
        return not isinstance(self.scheme, Keep)

    @property
    def parameters(self) -> int:
        """Number of values."""
        return prod(self.shape)

    @property
    def source_nbytes(self) -> int:
        """Bytes in the checkpoint."""
        return self.parameters * self.dtype.itemsize

    @property
    def arrays(self) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
        """Stored arrays: suffix -> (dtype, shape)."""
        return self.scheme.arrays(self.shape, self.dtype, self.wide)

    @property
    def nbytes(self) -> int:
        """Stored bytes, all overhead but file headers counted."""
        return sum(prod(shape) * dtype.itemsize for dtype, shape in self.arrays.values())

    @property
    def bpw(self) -> float:
        """Stored bits a weight; 0 for an empty tensor."""
        return 8.0 * self.nbytes / self.parameters if self.parameters else 0.0

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "name": self.name,
            "file": self.file,
            "shape": list(self.shape),
            "dtype": self.dtype.name,
            "role": self.role.kind,
            "layer": self.role.layer,
            "scheme": self.scheme.label,
            "why": self.why,
            "wide": self.wide,
            "bytes": self.nbytes,
            "bpw": round(self.bpw, 6),
        }


@dataclass(frozen=True)
class Plan:
    """Everything that is settled before work starts; see the module's page.

    Parameters
    ----------
    source : Checkpoint
    recipe : Recipe
        Resolved.
    architecture : Architecture
    rows : tuple of PlanRow
        In the order of the checkpoint; what is stored once (a tied head) has one row.
    config : dict
        config.json of the artifact, before ``quantization_config`` is added.
    notes : tuple of str
        What a person should know.
    scanned : bool
        Whether ``wide`` is known for every row (and the weights are known to be finite).
    """

    source: Checkpoint
    recipe: Recipe
    architecture: Architecture
    rows: tuple[PlanRow, ...]
    config: dict[str, Any]
    notes: tuple[str, ...] = ()
    scanned: bool = False

    @property
    def parameters(self) -> int:
        """Values in all tensors."""
        return sum(r.parameters for r in self.rows)

    @property
    def nbytes(self) -> int:
        """Stored bytes of all tensors, without file headers."""
        return sum(r.nbytes for r in self.rows)

    @property
    def bpw(self) -> float:
        """Stored bits a weight over all tensors."""
        return 8.0 * self.nbytes / max(self.parameters, 1)

    @property
    def quantized_bpw(self) -> float:
        """Stored bits a weight over the quantized tensors; 0 if there is none."""
        rows = [r for r in self.rows if r.quantized]
        count = sum(r.parameters for r in rows)
        return 8.0 * sum(r.nbytes for r in rows) / count if count else 0.0

    def budget(self, threads: int | None = None, max_memory: int | None = None) -> MemoryBudget:
        """Threads, block size and predicted peak memory for these tensors."""
        longest = max((matrix_shape(r.shape)[1] for r in self.rows), default=1)
        return memory_budget(usable_threads(threads), longest, max_memory)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "architecture": self.architecture.model_type,
            "recipe": self.recipe.resolved(),
            "parameters": self.parameters,
            "bytes": self.nbytes,
            "bpw": round(self.bpw, 6),
            "quantized_bpw": round(self.quantized_bpw, 6),
            "scanned": self.scanned,
            "tensors": [r.to_dict() for r in self.rows],
            "notes": list(self.notes),
        }


def make_plan(source: Checkpoint, recipe: Recipe, *, any_architecture: bool = False) -> Plan:
    """Decide what happens to each tensor; no weight is read (but for two heads that must be compared).

    Parameters
    ----------
    source : Checkpoint
    recipe : Recipe
        Resolved, see ``resolve_recipe``.
    any_architecture : bool
        Accept a family outside the table; roles are guessed from names.

    Raises
    ------
    UnsupportedModelError
        If the architecture is unknown, or the weights are already packed by another quantizer.
    CheckpointError
        If tensors are missing or do not fit the config; all offenders are named.
    """
    packed = source.packed_format()
    if packed:
        raise UnsupportedModelError(
            f"{source.path}: the weights are already quantized ({packed}); trapetum starts from float weights",
            hint="Use the original bfloat16, float16 or float32 checkpoint.",
        )
    architecture = resolve(source.config, any_architecture=any_architecture)
    head = check_tensors(source, architecture)
    rows = tuple(
        _row(source, recipe, architecture, name) for name in source.names() if name != head.duplicate
    )
    notes = [*source.notes, *head.notes, *_kept_notes(rows), *_idle_rules(recipe, rows), *_narrow_rows(rows)]
    if architecture.any_architecture:
        notes.append(
            f"architecture {architecture.model_type} is not in the table: roles are guessed from names"
        )
    return Plan(source, recipe, architecture, rows, {**source.config, **head.config}, tuple(notes))


def _row(source: Checkpoint, recipe: Recipe, architecture: Architecture, name: str) -> PlanRow:
    """Give one tensor its scheme: its form first, then the recipe."""
    role, shape, dtype = architecture.role(name), source.shape(name), source.dtype(name)
    scheme: Scheme = Keep()
    index = recipe.find(name, role.kind, role.layer, role.expert is not None)
    why = "no rule" if index is None else f"rules[{index}]: {recipe.rules[index]}"
    if dtype.name not in FLOATS:
        why = f"{dtype.name} is not a float type"
    elif prod(shape) == 0:
        why = "empty"
    elif len(shape) < 2:
        why = f"{role.kind}, one-dimensional"
    elif index is not None:
        scheme = recipe.scheme_of(recipe.rules[index])
    return PlanRow(name, source.file(name).name, shape, dtype, role, scheme, why)


def _kept_notes(rows: tuple[PlanRow, ...]) -> list[str]:
    """What is stored though no part of the model: buffers and unknown tensors, by name."""
    texts = {
        "buffer": "buffers that code recomputes; kept as they are",
        "other": "tensors that the architecture does not know; kept as they are",
    }
    notes = []
    for kind, text in texts.items():
        names = [r.name for r in rows if r.role.kind == kind and not r.quantized]
        if names:
            shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
            size = sum(r.nbytes for r in rows if r.role.kind == kind)
            notes.append(f"{len(names)} {text} ({size:,} bytes): {shown}")
    return notes


def _idle_rules(recipe: Recipe, rows: tuple[PlanRow, ...]) -> list[str]:
    """A rule of the user that selects nothing is most often a slip."""
    own = recipe.rules[: -len(DEFAULT_RULES)]
    used = {recipe.find(r.name, r.role.kind, r.role.layer, r.role.expert is not None) for r in rows}
    return [f"rules[{i}] ({rule}) selects no tensor" for i, rule in enumerate(own) if i not in used]


def _narrow_rows(rows: tuple[PlanRow, ...]) -> list[str]:
    """Codebooks that cost more than they save: over 10 bits a weight where at most 8 were asked for."""
    notes = []
    for label in dict.fromkeys(r.scheme.label for r in rows if r.quantized and r.bpw > 10):
        found = [r for r in rows if r.scheme.label == label and r.bpw > 10]
        bits = 8 * sum(r.nbytes for r in found) / sum(r.parameters for r in found)
        notes.append(
            f"{len(found)} tensors with short rows cost {bits:.2f} bits a weight under {label}, because each row "
            f"carries its own codebook (the first: {found[0].name}, rows of {found[0].shape[-1]})"
        )
    return notes
