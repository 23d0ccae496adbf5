"""The plan: one row a tensor, made from names, shapes and the config before any weight is read.

``make_plan`` resolves the architecture, has the checkpoint checked against its config (``intake``) and gives each
tensor its scheme. ``survey`` then reads the weights once and fills in ``wide``; from there on every stored byte is
known. What the plan promises is what the job writes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from trapetum.errors import UnsupportedModelError, listed, located
from trapetum.formats.checkpoint import Checkpoint
from trapetum.models.architectures import MATRIX_KINDS, Architecture, Role, resolve, with_tied
from trapetum.models.residual import RotatedCheckpoint
from trapetum.quantize.additive_intake import AdditiveAsIs
from trapetum.quantize.block_scheme import BlocksAsIs
from trapetum.quantize.blocks import MemoryBudget, memory_budget, usable_threads
from trapetum.quantize.float8_intake import Float8AsIs
from trapetum.quantize.hadamard import rotate_rows
from trapetum.quantize.intake import check_tensors
from trapetum.quantize.recipe import Recipe
from trapetum.quantize.rules import DEFAULT_RULES
from trapetum.quantize.scheme import Importance
from trapetum.quantize.schemes import NAMED, Keep, Options, Scheme
from trapetum.quantize.ternary import Ternary
from trapetum.quantize.ternary_intake import AsIs, TernaryAsIs
from trapetum.rotation import HadamardRotation
from trapetum.runtime.environment import available_memory
from trapetum.tensors import CodebookTensor, DenseTensor, QuantizedTensor, matrix_shape

if TYPE_CHECKING:
    from trapetum.formats.packed_ternary import AnyCheckpoint
    from trapetum.quantize.statistics import Statistics

__all__ = ["Plan", "PlanRow", "as_float", "make_plan", "tensor_values"]

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


def tensor_values(tensor: QuantizedTensor) -> NDArray[Any]:
    """Values of a source's tensor or row block: as stored where they are dense (see :func:`as_float`), else decoded."""
    return as_float(tensor.values) if isinstance(tensor, DenseTensor) else tensor.dequantize(slice(None))


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
    def rotated(self) -> bool:
        """Whether the plan's rotation is folded into the weights before they are quantized."""
        return isinstance(self.scheme, Ternary) and self.scheme.rotated

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
    source : Checkpoint, PackedCheckpoint or GgufCheckpoint
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
    rotation : HadamardRotation, optional
        Folded into the rows that are ``rotated``.
    statistics : Statistics, optional
        Of the inputs of the tensors.
    """

    source: AnyCheckpoint
    recipe: Recipe
    architecture: Architecture
    rows: tuple[PlanRow, ...]
    config: dict[str, Any]
    notes: tuple[str, ...] = ()
    scanned: bool = False
    rotation: HadamardRotation | None = None
    statistics: Statistics | None = None

    def importance(self, row: PlanRow) -> Importance:
        """What is known of the inputs of ``row``."""
        return None if self.statistics is None else self.statistics.importance(row)

    def values(self, row: PlanRow, rows: slice) -> NDArray[Any]:
        """What the scheme of ``row`` works on: a row block of the source, rotated where the row is."""
        values = tensor_values(self.source.load(row.name, rows))
        return self.rotation.fold(values) if self.rotation is not None and row.rotated else values

    def sampled(self, row: PlanRow, rows: slice, limit: float = np.inf) -> NDArray[Any]:
        """:meth:`values` before the survey: what it will refuse, not finite or above ``limit``, reads as zero."""
        values = self.values(row, rows)
        magnitude = np.abs(values).astype(np.float32, copy=False)
        held = (magnitude <= limit) & (magnitude < np.inf)
        return values if held.all() else np.where(held, values, values.dtype.type(0))

    def aimed(self, row: PlanRow, rows: slice, values: NDArray[Any]) -> NDArray[Any]:
        """What :meth:`values` are quantized towards; see :meth:`Statistics.aim`."""
        if self.statistics is None or isinstance(
            row.scheme, TernaryAsIs | BlocksAsIs | AdditiveAsIs | Float8AsIs
        ):
            return values
        return self.statistics.aim(row, rows, values)

    def taken(self, row: PlanRow, rows: slice) -> QuantizedTensor | None:
        """What is stored of a row block where nothing is searched: the source's own form; None elsewhere."""
        if isinstance(row.scheme, BlocksAsIs | AdditiveAsIs | Float8AsIs) and not isinstance(
            self.source, Checkpoint
        ):
            return self.source.stored(row.name, rows)
        return None if row.quantized else self.source.load(row.name, rows)

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
        threads = usable_threads(threads)
        return memory_budget(threads, longest, max_memory, available_memory(threads))

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


def make_plan(source: AnyCheckpoint, recipe: Recipe, *, any_architecture: bool = False) -> Plan:
    """Decide what happens to each tensor; no weight is read (but for two heads that must be compared).

    Parameters
    ----------
    source : Checkpoint or PackedCheckpoint
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
            f"{source.path}: the weights are already quantized ({packed}), by quantization_config or by the tensors' "
            "form; trapetum starts from float weights",
            hint="Use the original bfloat16, float16 or float32 checkpoint.",
        )
    with located(source.path):
        architecture = resolve(source.config, any_architecture=any_architecture)
        if recipe.rotate is not None:
            source = RotatedCheckpoint(source, architecture, recipe.seed)
        head = check_tensors(source, architecture)
    wanted = tuple(
        _row(source, recipe, architecture, name) for name in source.names() if name != head.duplicate
    )
    rows, fallen = _fit_rows(source, recipe, wanted)
    rotation = None
    if recipe.hadamard:
        rows, rotation, rotated = rotate_rows(rows, architecture, recipe.seed)
        fallen += rotated
    notes = [
        *source.notes,
        *head.notes,
        *fallen,
        *_kept_notes(rows),
        *_idle_rules(recipe, rows),
        *_narrow_rows(rows),
    ]
    if architecture.any_architecture:
        notes.append(
            f"architecture {architecture.model_type} is not in the table: roles are guessed from names"
        )
    config = dict(source.config) if head.tied is None else with_tied(source.config, head.tied)
    return Plan(source, recipe, architecture, rows, config, tuple(notes), rotation=rotation)


def _row(source: AnyCheckpoint, recipe: Recipe, architecture: Architecture, name: str) -> PlanRow:
    """Give one tensor its scheme: its form first, then the recipe."""
    role, shape, dtype = architecture.role(name), source.shape(name), source.dtype(name)
    scheme: Scheme = Keep()
    index = recipe.find(name, role.kind, role.layer, role.routed)
    why = "no rule" if index is None else f"rules[{index}]: {recipe.rules[index]}"
    if dtype.name not in FLOATS:
        why = f"{dtype.name} is not a float type"
    elif prod(shape) == 0:
        why = "empty"
    elif len(shape) < 2:
        why = f"{role.kind}, one-dimensional"
    elif index is not None:
        scheme = recipe.scheme_of(recipe.rules[index])
    if isinstance(scheme, Keep) and source.is_packed(name):
        scheme, why = AsIs(), f"{why}; its packed codes are taken over"
    return PlanRow(name, source.file(name).name, shape, dtype, role, scheme, why)


def _fit_rows(
    source: AnyCheckpoint, recipe: Recipe, rows: tuple[PlanRow, ...]
) -> tuple[tuple[PlanRow, ...], list[str]]:
    """Give rows that do not fit their scheme a fallback, with a note for each kind; refuse those that have none.

    Nothing is ever padded: a longer row would meet activations of the old length.
    """
    settled: list[PlanRow] = []
    moved: dict[tuple[str, str, str], list[str]] = {}
    refused: list[tuple[PlanRow, str]] = []
    for row in rows:
        misfit = row.scheme.misfit(row.shape)
        if misfit is None:
            settled.append(row)
            continue
        taken = next((s for s in recipe.fallbacks_of(row.scheme) if s.misfit(row.shape) is None), None)
        if taken is None:
            refused.append((row, misfit))
            continue
        moved.setdefault((row.scheme.label, misfit, taken.label), []).append(row.name)
        settled.append(
            replace(row, scheme=taken, why=f"{misfit}: {taken.label} instead of {row.scheme.label}")
        )
    if refused:
        lengths = sorted({row.shape[-1] for row, _ in refused})
        fits = "; ".join(f"rows of {n} fit {', '.join(_fitting(n))}" for n in lengths)
        raise UnsupportedModelError(
            f"{source.path}: {len(refused)} tensors do not fit their scheme: "
            + listed(f"{row.name} ({row.scheme.label}: {misfit})" for row, misfit in refused),
            hint=f"{fits}. Give these tensors a rule, or allow fallbacks.",
        )
    notes = [
        f"{misfit}: {len(names)} {'tensors take' if len(names) > 1 else 'tensor takes'} {taken} instead of {label}: "
        + ", ".join(names[:4])
        + (", ..." if len(names) > 4 else "")
        for (label, misfit, taken), names in moved.items()
    ]
    return tuple(settled), notes


def _fitting(length: int) -> list[str]:
    """Names of the schemes that a row of this length fits, ternary ones by group size."""
    schemes: dict[str, Scheme] = {}
    for name, build in NAMED.items():
        for options in (Options(), Options(group_size=64)) if name == Ternary.name else (Options(),):
            scheme = build(options)
            schemes.setdefault(scheme.label, scheme)
    return [
        label for label, s in schemes.items() if not isinstance(s, AsIs) and s.misfit((1, length)) is None
    ]


def _kept_notes(rows: tuple[PlanRow, ...]) -> list[str]:
    """What is stored though no part of the model, or not quantized though a weight: by name."""
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
    whole = [r for r in rows if r.role.kind in MATRIX_KINDS and not (r.quantized or r.dtype.name in FLOATS)]
    if whole:
        notes.append(
            f"weights of integers are kept as they are: {whole[0].name} ({whole[0].dtype.name})"
            + (f" and {len(whole) - 1} more" if len(whole) > 1 else "")
        )
    return notes


def _idle_rules(recipe: Recipe, rows: tuple[PlanRow, ...]) -> list[str]:
    """A rule of the user that selects nothing is most often a slip; one for a head that is tied is not."""
    own = recipe.rules[: -len(DEFAULT_RULES)]
    used = {recipe.find(r.name, r.role.kind, r.role.layer, r.role.routed) for r in rows}
    return [
        f"rules[{i}] ({rule}) selects no tensor"
        for i, rule in enumerate(own)
        if i not in used and rule.role != ["head"]
    ]


def _narrow_rows(rows: tuple[PlanRow, ...]) -> list[str]:
    """Codebooks that cost more than they save: over 10 bits a weight where at most 8 were asked for."""
    notes = []
    narrow = [r for r in rows if r.scheme.layout == CodebookTensor.layout and r.bpw > 10]
    for label in dict.fromkeys(r.scheme.label for r in narrow):
        found = [r for r in narrow if r.scheme.label == label]
        count, was, size = (
            sum(getattr(r, k) for r in found) for k in ("parameters", "source_nbytes", "nbytes")
        )
        advice = "; they would be smaller as they are: use keep = true" if size >= was else ""
        notes.append(
            f"short rows cost {8 * size / count:.2f} bits a weight under {label}, because each carries its own "
            f"codebook (tensors: {len(found)}, the first {found[0].name}, rows of {found[0].shape[-1]}){advice}"
        )
    return notes
