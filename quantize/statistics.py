"""What a job knows about the inputs of its tensors: an importance file, or moments that it collected itself.

Row blocks of one tensor, and tensors that read the same input, share one :class:`Hessian` and its factor; the few last
used ones are kept.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from trapetum.errors import OutputError, RecipeError, TrapetumError
from trapetum.formats.atomic import disk_errors
from trapetum.formats.imatrix import InputStatistics, MomentsWriter, open_statistics, write_imatrix
from trapetum.quantize.hessian import ENOUGH_TOKENS, MIN_TOKENS, Hessian, damping_for
from trapetum.rotation import HadamardRotation
from trapetum.runtime.tokenizer import read_text
from trapetum.tensors import matrix_shape

if TYPE_CHECKING:
    from trapetum.formats.source import TensorSource
    from trapetum.progress import Progress
    from trapetum.quantize.plan import PlanRow

__all__ = [
    "Calibration",
    "Statistics",
    "collect_importance",
    "collect_moments",
    "one_blas_thread",
]

_LEVEL = 0.1
"""Of their mean that mean squares are raised by: what an input is worth to the model varies less than its square.

KL of a Llama of 18 M parameters, 25,000 tokens, codebooks of 4 (3) bits: 0.0335 (0.1565) with 0, 0.0328 (0.1534) with
0.1, 0.0330 with 0.25, 0.0333 with 0.5."""
_KEPT = 2  # moments in memory beside the one in work; one of 11,008 inputs takes 1.5 GB with its factor


@dataclass(eq=False)
class Statistics:
    """Importance of the inputs of tensors, by name.

    Parameters
    ----------
    file : InputStatistics
        Stays open as long as this.
    rotation : HadamardRotation, optional
        Of the rows that are ``rotated``: their inputs are turned as well.
    """

    file: InputStatistics
    rotation: HadamardRotation | None = None
    _moments: OrderedDict[tuple[str, bool], Hessian] = field(default_factory=OrderedDict, init=False)
    _lock: Lock = field(default_factory=Lock, init=False)

    def importance(self, row: PlanRow) -> Hessian | NDArray[np.float32] | None:
        """What is known of the inputs of a tensor; thread-safe.

        Returns
        -------
        Hessian, ndarray of float32 [in_features], or None
            The moment where the file has one of enough tokens, else the mean squares and a tenth of their mean.
        """
        width = matrix_shape(row.shape)[1]
        turn = self.rotation if row.rotated else None
        shared = self.file.shared(row.name)
        if shared is None or shared[1] < MIN_TOKENS * width:
            diagonal = self.file.diagonal(row.name, width)
            if diagonal is None:
                return None
            levelled = (diagonal + _LEVEL * diagonal.mean(dtype=np.float64)).astype(np.float32)
            return levelled if turn is None else _flattened(levelled, turn)
        with self._lock:
            known = (shared[0], turn is not None)
            hessian = self._moments.pop(known, None)
            if hessian is None:
                hessian = self._hessian(row.name, width, turn)
            self._moments[known] = hessian
            while len(self._moments) > _KEPT:
                self._moments.popitem(last=False)
        return hessian

    def _hessian(self, name: str, width: int, turn: HadamardRotation | None) -> Hessian:
        found = self.file.moment(name, width)
        if found is None:
            raise ValueError(f"{self.file.path}: the moment of {name} is gone")
        _, moment, tokens = found
        if turn is not None:
            moment = np.ascontiguousarray(turn.fold(np.ascontiguousarray(turn.fold(moment).T)))
        return Hessian(moment, tokens)

    def aim(self, row: PlanRow, rows: slice, values: NDArray[Any]) -> NDArray[Any]:
        """What a row block is quantized towards: its values, unless the inputs say better (``quantize.sequential``).

        Parameters
        ----------
        row : PlanRow
        rows : slice
        values : ndarray, shape (rows, in_features)
            Rotated where the row is.
        """
        return values

    def has_moment(self, row: PlanRow) -> bool:
        """Whether :meth:`importance` is a Hessian."""
        shared = self.file.shared(row.name)
        return shared is not None and shared[1] >= MIN_TOKENS * matrix_shape(row.shape)[1]

    def notes(self, rows: Sequence[PlanRow]) -> list[str]:
        """What a person should know about these tensors and this file; reads and checks everything that is needed.

        Raises
        ------
        RecipeError
            If the file knows none of them.
        FormatError
            If it belongs to another model.
        """
        wanted = [r for r in rows if r.quantized]
        unknown, few, damped = [], [], []
        for row in wanted:
            shared = self.file.shared(row.name)
            if shared is None:
                if self.file.diagonal(row.name, matrix_shape(row.shape)[1]) is None:
                    unknown.append(row.name)
            elif not self.has_moment(row):
                few.append((row, shared[1]))
            elif shared[1] < ENOUGH_TOKENS * (width := matrix_shape(row.shape)[1]):
                damped.append((damping_for(shared[1], width), row.name))
        if wanted and len(unknown) == len(wanted):
            raise RecipeError(
                f"{self.file.path}: knows none of the {len(wanted)} tensors that are quantized",
                hint="The file belongs to another model.",
            )
        notes = list(self.file.notes)
        if unknown:
            notes.append(
                f"{len(unknown)} tensors are quantized without importance, for nothing is known of their inputs: "
                + ", ".join(unknown[:4])
                + (", ..." if len(unknown) > 4 else "")
            )
        if damped:
            share, name = max(damped)
            notes.append(
                f"{len(damped)} tensors saw fewer than {ENOUGH_TOKENS} tokens for each input: their moments are damped "
                f"more, by up to {share:.3f} of their mean ({name})"
            )
        if few:
            notes.append(
                f"{len(few)} tensors saw fewer than {MIN_TOKENS} tokens for each input: only the mean squares of "
                f"their inputs are used (the first: {few[0][0].name}, {few[0][1]:,} tokens for "
                f"{few[0][0].shape[-1]:,} inputs)"
            )
        return notes


def _flattened(diagonal: NDArray[np.float32], rotation: HadamardRotation) -> NDArray[np.float32]:
    """The diagonal of ``R diag(h) R^T``: entries of a Hadamard block have one magnitude, so it is the block's mean."""
    means = diagonal.reshape(-1, rotation.block_size).mean(axis=1)
    flat: NDArray[np.float32] = np.repeat(means, rotation.block_size).astype(np.float32)
    return flat


@dataclass(frozen=True)
class Calibration:
    """Where a job's statistics come from.

    Parameters
    ----------
    path : Path
        A text that the model is run over, or an importance file.
    tokens : int, optional
        Of the text, most that are taken; None says that ``path`` is an importance file.
    sequential : bool
        Each layer is calibrated behind the layers before it as they are stored (``quantize.sequential``).
    """

    path: Path
    tokens: int | None = None
    sequential: bool = False

    @property
    def text(self) -> Path | None:
        """The text; None where ``path`` is an importance file."""
        return None if self.tokens is None else self.path

    def identity(self) -> dict[str, Any]:
        """What the job's bytes depend on; the hash, not the place.

        Raises
        ------
        RecipeError
            If the file cannot be read, or the text is empty.
        FormatError
            If the text is not UTF-8.
        """
        digest = hashlib.sha256()
        try:
            with self.path.open("rb") as file:
                while piece := file.read(1 << 22):
                    digest.update(piece)
        except OSError as error:
            raise RecipeError(f"{self.path}: cannot be read ({error.strerror})") from error
        if self.text is not None and not read_text(self.text):  # before a job is begun with it
            raise RecipeError(
                f"{self.text}: the file is empty", hint="Name a text of a few hundred kilobytes."
            )
        found: dict[str, Any] = {"file": self.path.name, "sha256": digest.hexdigest()}
        found |= {"tokens": self.tokens} if self.tokens is not None else {}
        return found | ({"sequential": True} if self.sequential else {})

    def statistics(
        self,
        model: Path | TensorSource,
        work: Path,
        threads: int,
        progress: Progress,
        rotation: HadamardRotation | None,
    ) -> Statistics:
        """The statistics; of a text they are collected in the folder ``work``, where a later run finds them.

        Raises
        ------
        FormatError, RecipeError
            If a file cannot be used.
        """
        path = self.path
        if self.tokens is not None:
            path = work / "moments.safetensors"
            if not path.is_file():
                collect_moments(
                    model, self.path, path, tokens=self.tokens, threads=threads, progress=progress
                )
        return Statistics(open_statistics(path), rotation)


def collect_moments(
    model: Path | TensorSource,
    text: Path,
    out: Path,
    *,
    tokens: int,
    overwrite: bool = False,
    threads: int | None = None,
    progress: Progress,
) -> None:
    """Run a model over a text and write the second moments of all its linear inputs.

    Parameters
    ----------
    model : Path or TensorSource
        Opened by others, it stays open.
    text : Path
        UTF-8.
    out : Path
        See docs/formats/imatrix.md.
    tokens : int
        Most tokens to take.
    overwrite : bool
        Replace an importance file that exists; no other file ever is.
    threads : int, optional
    progress : Progress

    Raises
    ------
    RecipeError
        If the text cannot be read.
    OutputError
        If ``out`` exists.
    """
    from trapetum.formats.source import open_source
    from trapetum.kernels.cpu.pool import Pool
    from trapetum.runtime.calibrate import calibration_ids, collect, distinct_inputs

    _check_output(out, overwrite=overwrite)
    with open_source(model) if isinstance(model, Path) else contextlib.nullcontext(model) as source:
        ids = calibration_ids(source, read_text(text), tokens)
        progress.note(f"calibrating on {ids.size:,} tokens of {text}")
        pool = Pool(threads)
        try:
            writer = MomentsWriter(out, distinct_inputs(source), [text.name])
            with writer:
                for inputs in collect(source, ids, pool, moments=True, progress=progress):
                    if inputs.moment is not None:
                        writer.write(inputs.weights, inputs.moment / max(inputs.tokens, 1), inputs.tokens)
        finally:
            pool.close()


def _check_output(out: Path, *, overwrite: bool) -> None:
    """Only an importance file is ever replaced: a slip in the name must not cost weights or a text.

    A folder that cannot be written is found here, not behind hours of work.
    """
    with disk_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(out.parent, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    if not os.path.lexists(out):
        return
    if not overwrite:
        raise OutputError(f"{out}: exists", hint="Give --overwrite to replace it, or another name with -o.")
    try:
        open_statistics(out).close()
    except (TrapetumError, OSError):
        raise OutputError(
            f"{out}: is no importance file, so it is not replaced", hint="Choose another name with -o."
        ) from None


def one_blas_thread() -> Any:
    """Keep BLAS to one thread until ``restore_original_limits()``: its sums depend on the number of threads."""
    import scipy.linalg  # noqa: F401 - brings a BLAS of its own, which must be there to be limited
    from threadpoolctl import threadpool_limits

    return threadpool_limits(1, "blas")


def collect_importance(
    model: Path,
    text: Path,
    out: Path,
    *,
    tokens: int,
    overwrite: bool = False,
    threads: int | None = None,
    progress: Progress,
) -> None:
    """As :func:`collect_moments`, but llama.cpp's importance matrix: the diagonals alone."""
    from trapetum.formats.source import open_source
    from trapetum.kernels.cpu.pool import Pool
    from trapetum.runtime.calibrate import calibration_ids, collect

    _check_output(out, overwrite=overwrite)
    with open_source(model) as source:
        ids = calibration_ids(source, read_text(text), tokens)
        progress.note(f"calibrating on {ids.size:,} tokens of {text}")
        pool = Pool(threads)
        try:
            found = {
                # a stack of experts has a row for each of them, all alike
                name: (
                    np.broadcast_to(inputs.squares, (*source.shape(name)[:-2], inputs.squares.size)),
                    inputs.tokens,
                )
                for inputs in collect(source, ids, pool, progress=progress)
                for name in inputs.weights
            }
        finally:
            pool.close()
        left_out = write_imatrix(out, found, datasets=[text.name], chunk_size=ids.shape[1])
    if left_out:
        progress.note(
            f"{len(left_out)} weights have no GGUF name and are left out: {', '.join(left_out[:4])}"
        )
