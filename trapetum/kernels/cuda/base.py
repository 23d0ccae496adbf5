"""A matrix on the card: what all layouts share of ``y = x W^T``, of decoding rows, and of sharing out a launch.

Up to 16 tokens go to the matrix-vector kernels; each launch writes every element of the result, the same bits every
time. Float16 and bfloat16 are said by the dtype of ``x`` and ``out``: NumPy has no bfloat16, ``uint16`` means its bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from trapetum.errors import KernelUnavailable
from trapetum.kernels.cuda.dense import multiply_dense
from trapetum.kernels.cuda.module import Kernel, card, import_cupy, kernels
from trapetum.kernels.cuda.workspace import Workspace

__all__ = ["ACTIVATIONS", "KINDS", "MOST_TOKENS", "CudaLinear", "Launch", "Tuning", "out_kind", "share_out"]

MOST_TOKENS = 16
"""Tokens that one launch of a matrix-vector kernel takes."""
DENSE_BYTES = 64 << 20
"""Decoded weights at a time: about an H200's L2, and so much that launches are few."""

KINDS = {"float16": 0, "uint16": 1, "bfloat16": 1, "float32": 2}
"""Names of dtypes, and the numbers by which kernels know them."""
ACTIVATIONS = {"float16": "f16", "uint16": "bf16", "bfloat16": "bf16"}
"""Names of dtypes that are multiplied, and what they are called in the names of kernels."""


def out_kind(array: Any) -> int:
    """The number by which kernels know the dtype of their output.

    Raises
    ------
    ValueError
        If it is none of float16, uint16 (bfloat16 bits), float32.
    """
    if array.dtype.name not in KINDS:
        raise ValueError(f"{array.dtype} cannot be written; float16, uint16 (bfloat16 bits) and float32 can")
    return KINDS[array.dtype.name]


class Launch(NamedTuple):
    """How many blocks take how much of a matrix; see ``partition.cuh``."""

    kernel: Kernel
    grid: tuple[int]
    threads: int
    shared: int
    share: int
    extra: int
    step_units: int
    per_tile: int


@dataclass(frozen=True)
class Tuning:
    """What was chosen by measurement for one kernel.

    Parameters
    ----------
    threads : int
        A block.
    resident : int
        Most blocks on a multiprocessor.
    """

    threads: int
    resident: int


def share_out(tiles: int, per_tile: int, most_blocks: int) -> tuple[int, int]:
    """Blocks of a launch, and units of the step that their shares are multiples of.

    The fewer tiles blocks share, the less they have to add up and the fewer tables they build twice. So the step is the
    largest of a tile, a half, a quarter ... that leaves no block more than an eighth above the mean; else one unit.

    Examples
    --------
    >>> share_out(256, 16, 264), share_out(272, 320, 264), share_out(272, 321, 264)
    ((256, 16), (264, 40), (264, 1))
    """
    for parts in (1, 2, 4, 8, 16):
        steps = tiles * parts
        blocks = min(most_blocks, steps)
        if per_tile % parts == 0 and -(-steps // blocks) * most_blocks <= 1.125 * steps:
            return blocks, per_tile // parts
    return min(most_blocks, tiles * per_tile), 1


class CudaLinear(ABC):
    """One matrix on the card; made by :func:`~trapetum.kernels.cuda.linear.cuda_linear`.

    Parameters
    ----------
    data : cupy.ndarray of uint8, shape (bytes,)
        The planes tensor as it is stored.
    rows, in_features : int
        N and K.
    entries : int
        As in the file's description: codebook size, number of codebooks, or 0.
    workspace : Workspace
        Scratch memory; launches that share one must be on one stream.
    """

    layout: ClassVar[str]
    tile: ClassVar[tuple[int, int]]
    """Rows of a tile, and inputs of a unit."""
    dense_tokens: ClassVar[int] = 48
    """From so many tokens on, decoding all weights for cuBLAS is faster than reading them again for every 16."""
    whole_inputs: ClassVar[int] = 8
    """Where rows are multiples of so many inputs, activations are loaded 16 bytes at a time."""
    family: ClassVar[str]
    """What the names of its kernels begin with."""
    buckets: ClassVar[tuple[int, ...]]
    """Numbers of tokens for which there is a kernel."""
    tuning: Mapping[int, Tuning]

    def __init__(self, data: Any, rows: int, in_features: int, entries: int, workspace: Workspace) -> None:
        self.data = data
        self.rows = rows
        self.in_features = in_features
        self.entries = entries
        self.workspace = workspace
        self._launches: dict[tuple[str, int], Launch] = {}
        workspace.reserve_tiles(self.row_tiles)

    def unit_inputs(self, bucket: int) -> int:
        """Inputs of a unit of the kernel for so many tokens."""
        return self.tile[1]

    @property
    def row_tiles(self) -> int:
        """Tiles along the rows."""
        return -(-self.rows // self.tile[0])

    @property
    def per_tile(self) -> int:
        """Units of a tile."""
        return -(-self.in_features // self.tile[1])

    @property
    def nbytes(self) -> int:
        """Bytes that a matrix-vector product reads."""
        return int(self.data.nbytes)

    @property
    @abstractmethod
    def source(self) -> str:
        """Key of ``module.SOURCES``."""

    @abstractmethod
    def shared(self, tokens: int, threads: int) -> int:
        """Dynamic shared memory of a block that multiplies ``tokens``."""

    @abstractmethod
    def pointers(self) -> tuple[Any, ...]:
        """The weights' arguments of every kernel."""

    def kernel_name(self, activations: str, bucket: int) -> str:
        """Name in the source."""
        return f"{self.family}_gemv_{activations}_{bucket}"

    def multiply(self, x: Any, out: Any = None, stream: Any = None) -> Any:
        """``x W^T``.

        Parameters
        ----------
        x : cupy.ndarray of float16 or uint16 (bfloat16 bits), shape (tokens, in_features)
            Rows one after the other in memory.
        out : cupy.ndarray of float16, uint16 or float32, shape (tokens, rows), optional
            Like ``x`` by default.
        stream : cupy.cuda.Stream, optional
            The current one by default.

        Returns
        -------
        cupy.ndarray
            ``out``.

        Raises
        ------
        ValueError
            If shapes or dtypes do not fit.
        """
        cupy = import_cupy()
        self._check(x)
        tokens = x.shape[0]
        if out is None:
            out = cupy.empty((tokens, self.rows), x.dtype)
        if out.shape != (tokens, self.rows) or not out.flags.c_contiguous:
            raise ValueError(f"out has shape {out.shape}; contiguous {(tokens, self.rows)} is needed")
        if out_kind(out) not in (out_kind(x), KINDS["float32"]):
            raise ValueError(f"out is {out.dtype}; float32 and the dtype of x, {x.dtype}, are allowed")
        if tokens > MOST_TOKENS:
            self._multiply_many(x, out, stream)
        else:
            self._multiply_few(x, out, stream)
        return out

    def _check(self, x: Any) -> None:
        if x.ndim != 2 or x.shape[1] != self.in_features or not x.flags.c_contiguous:
            raise ValueError(f"x has shape {x.shape}; contiguous (tokens, {self.in_features}) is needed")
        if x.dtype.name not in ACTIVATIONS:
            raise ValueError(f"x is {x.dtype}; float16 and uint16 (bfloat16 bits) are multiplied")

    def _multiply_few(self, x: Any, out: Any, stream: Any) -> None:
        tokens = x.shape[0]
        bucket = next(b for b in self.buckets if tokens <= b)
        launch = self._launch(ACTIVATIONS[x.dtype.name], bucket)
        aligned = x.data.ptr % 16 == 0 and self.in_features % self.whole_inputs == 0
        arguments = (*self.pointers(), x, out, *self._common(launch, tokens, out, aligned))
        launch.kernel.launch(launch.grid, launch.threads, arguments, launch.shared, stream, early=True)

    def _multiply_many(self, x: Any, out: Any, stream: Any) -> None:
        """Decode rows into scratch memory that fits L2, multiply them by cuBLAS, a few thousand at a time."""
        if x.shape[0] < self.dense_tokens:
            for first in range(0, x.shape[0], MOST_TOKENS):
                self._multiply_few(x[first : first + MOST_TOKENS], out[first : first + MOST_TOKENS], stream)
            return
        height = self.tile[0]
        tiles_at_once = max(1, min(self.row_tiles, DENSE_BYTES // (2 * self.in_features * height)))
        scratch = self.workspace.dense(tiles_at_once * height * self.in_features)
        for first in range(0, self.row_tiles, tiles_at_once):
            count = min(tiles_at_once, self.row_tiles - first)
            self._decode_tiles(first, count, scratch, ACTIVATIONS[x.dtype.name], stream)
            rows = min(count * height, self.rows - first * height)
            multiply_dense(x, scratch, rows, out, first * height, stream)

    def _decode_tiles(self, first: int, count: int, out: Any, activations: str, stream: Any) -> None:
        """Rows of ``count`` tiles from ``first`` on, in the dtype of the activations, one after the other."""
        kernel = kernels(self.source)[f"{self.family}_dense_{activations}"]
        # Eight warps a block, three blocks on a multiprocessor; several share a tile, each with a table of its own.
        across = max(1, min(-(-self.per_tile // 8), 3 * card().processors // count))
        work = self._work(0, 0, True)
        arguments = (*self.pointers(), first, out, *(0, 0, 0), *work)
        kernel.launch((count, across), 256, arguments, 65536, stream, early=True)

    def _common(self, launch: Launch, tokens: int, out: Any, aligned: bool) -> tuple[Any, ...]:
        """Workspace, and the fields of ``Work``."""
        work = self._work(tokens, out_kind(out), aligned, launch.per_tile)
        shares = launch.share, launch.extra, launch.step_units
        return (self.workspace.partial, self.workspace.arrived, *shares, *work)

    def _work(self, tokens: int, kind: int, aligned: bool, per_tile: int = 0) -> tuple[Any, ...]:
        return (per_tile or self.per_tile, self.rows, self.in_features, tokens, kind, aligned)

    def _launch(self, activations: str, bucket: int) -> Launch:
        found = self._launches.get((activations, bucket))
        if found is None:
            found = self._launches[activations, bucket] = self._plan(activations, bucket)
        return found

    def _plan(self, activations: str, bucket: int) -> Launch:
        device = card()
        tuning = self.tuning[bucket]
        kernel = kernels(self.source)[self.kernel_name(activations, bucket)]
        shared = self.shared(bucket, tuning.threads)
        resident = min(kernel.resident(tuning.threads, shared), tuning.resident)
        if not resident:
            raise KernelUnavailable(f"{kernel.name} does not fit on a multiprocessor of {device.name}")
        per_tile = -(-self.in_features // self.unit_inputs(bucket))
        blocks, step = share_out(self.row_tiles, per_tile, device.processors * resident)
        self.workspace.reserve_partial(blocks * 2 * self.tile[0] * bucket)
        share, extra = divmod(self.row_tiles * per_tile // step, blocks)
        return Launch(kernel, (blocks,), tuning.threads, shared, share, extra, step, per_tile)

    def take(self, ids: Any, out: Any, stream: Any = None) -> Any:
        """Rows of the matrix, decoded: an embedding look-up.

        Parameters
        ----------
        ids : cupy.ndarray of int32, shape (count,), or None for all rows in order
        out : cupy.ndarray of float16, uint16 (bfloat16 bits) or float32, shape (count, in_features)
            Rows that do not exist become NaN.
        stream : cupy.cuda.Stream, optional
        """
        count = self.rows if ids is None else ids.shape[0]
        if out.shape != (count, self.in_features) or not out.flags.c_contiguous:
            raise ValueError(f"out has shape {out.shape}; contiguous {(count, self.in_features)} is needed")
        kernel = kernels(self.source)[f"{self.family}_rows"]
        threads = count * self.row_threads
        arguments = (
            *self.pointers(),
            ids,
            *self._first_and_count(count),
            out,
            *(0, 0, 0),
            *self._work(0, out_kind(out), False),
        )
        kernel.launch((max(1, -(-threads // 256)),), 256, arguments, 0, stream, early=True)
        return out

    def _first_and_count(self, count: int) -> tuple[int, ...]:
        """Arguments of the kernel that decodes rows: how many, behind where it begins, if it is asked."""
        return (count,)

    @property
    def row_threads(self) -> int:
        """Threads that decode one row."""
        return self.per_tile
