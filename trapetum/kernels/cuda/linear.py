"""Linear layers on the card: ``y = x W^T`` from weights exactly as a planes file stores them.

:func:`cuda_linear` uploads the bytes of a planes tensor and returns a :class:`CudaLinear`. Its ``multiply`` takes 1 to
16 tokens to the matrix-vector kernels; each launch writes every element of the result, the same bits every time.
Float16 and bfloat16 are said by the dtype of ``x`` and ``out``: NumPy has no bfloat16, so ``uint16`` means its bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trapetum.errors import KernelUnavailable
from trapetum.formats import planes, tiles
from trapetum.kernels.cuda.dense import multiply_dense
from trapetum.kernels.cuda.module import Kernel, card, import_cupy, kernels
from trapetum.kernels.cuda.workspace import Workspace

__all__ = ["LAYOUTS", "MOST_TOKENS", "CudaLinear", "cuda_linear", "out_kind"]

MOST_TOKENS = 16
"""Tokens that one launch of a matrix-vector kernel takes."""
DENSE_BYTES = 64 << 20
"""Decoded weights at a time: about an H200's L2, and so much that launches are few."""

# Four stages of 128 x 128 codes and 128 scales, and their barriers.
_GEMM_SHARED = 4 * (128 * 128 + 1024) + 64

_KINDS = {"float16": 0, "uint16": 1, "bfloat16": 1, "float32": 2}
_ACTIVATIONS = {"float16": "f16", "uint16": "bf16", "bfloat16": "bf16"}


def out_kind(array: Any) -> int:
    """The number by which kernels know the dtype of their output.

    Raises
    ------
    ValueError
        If it is none of float16, uint16 (bfloat16 bits), float32.
    """
    if array.dtype.name not in _KINDS:
        raise ValueError(f"{array.dtype} cannot be written; float16, uint16 (bfloat16 bits) and float32 can")
    return _KINDS[array.dtype.name]


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
    """One matrix on the card; made by :func:`cuda_linear`.

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
        if out_kind(out) not in (out_kind(x), _KINDS["float32"]):
            raise ValueError(f"out is {out.dtype}; float32 and the dtype of x, {x.dtype}, are allowed")
        if tokens > MOST_TOKENS:
            self._multiply_many(x, out, stream)
        else:
            self._multiply_few(x, out, stream)
        return out

    def _check(self, x: Any) -> None:
        if x.ndim != 2 or x.shape[1] != self.in_features or not x.flags.c_contiguous:
            raise ValueError(f"x has shape {x.shape}; contiguous (tokens, {self.in_features}) is needed")
        if x.dtype.name not in _ACTIVATIONS:
            raise ValueError(f"x is {x.dtype}; float16 and uint16 (bfloat16 bits) are multiplied")

    def _multiply_few(self, x: Any, out: Any, stream: Any) -> None:
        tokens = x.shape[0]
        bucket = next(b for b in self.buckets if tokens <= b)
        launch = self._launch(_ACTIVATIONS[x.dtype.name], bucket)
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
            self._decode_tiles(first, count, scratch, _ACTIVATIONS[x.dtype.name], stream)
            rows = min(count * height, self.rows - first * height)
            multiply_dense(x, scratch, rows, out, first * height, stream)

    def _decode_tiles(self, first: int, count: int, out: Any, activations: str, stream: Any) -> None:
        """Rows of ``count`` tiles from ``first`` on, in the dtype of the activations, one after the other."""
        kernel = kernels(self.source)[f"{self.family}_dense_{activations}"]
        # Eight warps a block; several blocks share a tile where tiles are few.
        across = max(1, min(-(-self.per_tile // 8), -(-8 * card().processors // count)))
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
            *((0, count) if self.family == "ternary" else (count,)),
            out,
            *(0, 0, 0),
            *self._work(0, out_kind(out), False),
        )
        kernel.launch((max(1, -(-threads // 256)),), 256, arguments, 0, stream, early=True)
        return out

    @property
    def row_threads(self) -> int:
        """Threads that decode one row."""
        return self.per_tile


class CodebookLinear(CudaLinear):
    """What both sizes of codebooks share: activations lie beside the table where they fit."""

    def _multiply_few(self, x: Any, out: Any, stream: Any) -> None:
        tokens = x.shape[0]
        bucket = next((b for b in self.buckets if tokens <= b), 0)
        if not bucket:  # more than the largest kernel takes
            half = self.buckets[-1]
            self._multiply_few(x[:half], out[:half], stream)
            self._multiply_few(x[half:], out[half:], stream)
            return
        activations = _ACTIVATIONS[x.dtype.name]
        launch = self._launch(activations, bucket)
        staged = launch.shared + tokens * self.per_tile * self.tile[1] * 2
        # A quarter of the multiprocessor's memory must not cost one of its two blocks.
        most = card().shared // self.tuning[bucket].resident - 4096
        if staged <= most:
            launch = self._launch(f"staged {activations}", bucket)
        aligned = x.data.ptr % 16 == 0 and self.in_features % self.whole_inputs == 0
        arguments = (*self.pointers(), x, out, *self._common(launch, tokens, out, aligned))
        shared = staged if staged <= most else launch.shared
        launch.kernel.launch(launch.grid, launch.threads, arguments, shared, stream, early=True)

    def kernel_name(self, activations: str, bucket: int) -> str:
        """Two kernels for each number of tokens."""
        kind, _, dtype = activations.rpartition(" ")
        return f"{self.family}_{kind or 'gemv'}_{dtype}_{bucket}"


class Codebook4Linear(CodebookLinear):
    """``codebook4-v1``."""

    layout = tiles.Codebook4Tiles.layout
    tile = (64, 16)
    buckets = (2, 4, 8, 16)
    family = source = "codebook4"
    whole_inputs = 16
    tuning: Mapping[int, Tuning] = {
        2: Tuning(512, 2),
        4: Tuning(512, 2),
        8: Tuning(512, 1),
        16: Tuning(512, 1),
    }

    def shared(self, tokens: int, threads: int) -> int:
        """The table of pairs, whose place sums of warps take, and the entries of two tiles."""
        return max(65536, threads // 32 * tokens * 64 * 4) + 2 * 2048

    def pointers(self) -> tuple[Any, ...]:
        """Codes and entries."""
        at = self.row_tiles * self.per_tile * 512
        return self.data, self.data[at:]


class Codebook8Linear(CodebookLinear):
    """``codebook8-v1``."""

    layout = tiles.Codebook8Tiles.layout
    tile = (128, 8)
    buckets = (2, 4, 8)
    family = source = "codebook8"
    tuning: Mapping[int, Tuning] = {2: Tuning(512, 2), 4: Tuning(512, 1), 8: Tuning(512, 1)}

    def shared(self, tokens: int, threads: int) -> int:
        """The table, whose place sums of warps take, and the sums of a tile."""
        return 65536 + 128 * tokens * 4

    def pointers(self) -> tuple[Any, ...]:
        """Codes and tables."""
        at = self.row_tiles * self.per_tile * 1024
        return self.data, self.data[at:]


class AdditiveLinear(CudaLinear):
    """``additive-v1``."""

    layout = tiles.AdditiveTiles.layout
    family = "additive"
    buckets = (8, 16)
    tuning: Mapping[int, Tuning] = {8: Tuning(512, 2), 16: Tuning(512, 1)}

    def __init__(self, data: Any, rows: int, in_features: int, entries: int, workspace: Workspace) -> None:
        self._sizes = tiles.AdditiveTiles(rows, in_features, entries)
        self.tile = self._sizes.tile  # type: ignore[misc]
        super().__init__(data, rows, in_features, entries, workspace)

    @property
    def source(self) -> str:
        """Compiled for one number of codebooks."""
        return f"additive{self.entries}"

    def shared(self, tokens: int, threads: int) -> int:
        """Codebooks, eight times, and the sums of warps."""
        return -(-self.entries // 2) * 65536 + threads // 32 * 2 * 16 * tokens * 4

    def pointers(self) -> tuple[Any, ...]:
        """Codes, codebooks, scales."""
        return self.data, self.data[self._sizes.tables_offset :], self.data[self._sizes.scales_offset :]

    @property
    def row_threads(self) -> int:
        """A thread a group."""
        return self.in_features // 8

    def _decode_tiles(self, first: int, count: int, out: Any, activations: str, stream: Any) -> None:
        """See :meth:`CudaLinear._decode_tiles`."""
        kernel = kernels(self.source)[f"additive_dense_{activations}"]
        arguments = (*self.pointers(), first, count, out, *(0, 0, 0), *self._work(0, 0, True))
        kernel.launch((card().processors,), 512, arguments, self.shared(0, 512), stream, early=True)


class TernaryLinear(CudaLinear):
    """``planes-v1``: activations are quantized to 8 bits a group of 128."""

    layout = planes.LAYOUT
    tile = (16, 256)
    buckets = (2, 4, 8, 16)
    family = source = "ternary"
    tuning: Mapping[int, Tuning] = {
        2: Tuning(256, 2),
        4: Tuning(384, 2),
        8: Tuning(384, 2),
        16: Tuning(384, 1),
    }
    fused_inputs: ClassVar[int] = 8192
    """Up to so many inputs of all tokens, every block quantizes them for itself: that takes it half a microsecond for
    2,000 of them; a launch for all blocks takes two (H200: one token, 17408 x 5120: 13.1 us against 15.3; 5120 x 17408:
    18.2 against 16.6)."""

    def shared(self, tokens: int, threads: int) -> int:
        """Sums of warps."""
        return threads // 32 * 2 * 16 * tokens * 4

    def unit_inputs(self, bucket: int) -> int:
        """The kernels of one and two tokens take twice as many inputs at a time."""
        return 512 if bucket == 2 else 256

    def _activation_bytes(self, tokens: int, bucket: int) -> int:
        groups = -(-self.in_features // self.unit_inputs(bucket)) * self.unit_inputs(bucket) // 128
        return tokens * groups * (128 + 8)

    def pointers(self) -> tuple[Any, ...]:
        """Both planes."""
        return (self.data,)

    def kernel_name(self, activations: str, bucket: int) -> str:
        """Rows of an odd number of groups have kernels of their own."""
        odd = "_odd" if self.in_features % self.unit_inputs(bucket) else ""
        return f"ternary_gemv_{activations}_{bucket}{odd}"

    @property
    def row_threads(self) -> int:
        """A thread a word of codes."""
        return self.in_features // 16

    def _multiply_few(self, x: Any, out: Any, stream: Any) -> None:
        tokens = x.shape[0]
        activations = _ACTIVATIONS[x.dtype.name]
        aligned = x.data.ptr % 8 == 0
        bucket = next(b for b in self.buckets if tokens <= b)
        if bucket <= 4 and tokens * self.in_features <= self.fused_inputs:
            launch = self._launch(activations, bucket)
            shared = self.shared(tokens, launch.threads) + self._activation_bytes(tokens, bucket)
            common = self._common(launch, tokens, out, aligned)
            arguments = (self.data, x, None, None, 0, out, *common)
            launch.kernel.launch(launch.grid, launch.threads, arguments, shared, stream, early=True)
            return
        slots = -(-tokens // 8) * 8
        codes, groups = self.workspace.activations(slots, self.in_features)
        self.quantize(x, codes, groups, slots, stream)
        self.multiply_quantized(codes, groups, slots, tokens, out, stream)

    def _multiply_many(self, x: Any, out: Any, stream: Any) -> None:
        if card().capability != 90 or x.shape[0] < self.dense_tokens:
            super()._multiply_many(x, out, stream)
            return
        tokens = x.shape[0]
        found = kernels("ternary_gemm")
        tiles = -(-tokens // 128)
        codes, groups = self.workspace.activations(tiles * 128, self.in_features)
        numbers = (tokens, self.in_features, x.data.ptr % 8 == 0)
        groups_of_all = tiles * 128 * (self.in_features // 128)
        quantize = found[f"quantize_tiles_{_ACTIVATIONS[x.dtype.name]}"]
        quantize.launch((-(-groups_of_all // 32),), 256, (x, codes, groups, *numbers), 0, stream, early=True)
        arguments = (self.data, codes, groups, out, 0, 0, 0, *self._work(tokens, out_kind(out), True))
        found["ternary_gemm"].launch(
            (tiles, -(-self.rows // 128)), 288, arguments, _GEMM_SHARED, stream, early=True
        )

    def _decode_tiles(self, first: int, count: int, out: Any, activations: str, stream: Any) -> None:
        """See :meth:`CudaLinear._decode_tiles`."""
        rows = min(count * 16, self.rows - first * 16)
        kind = _KINDS["float16" if activations == "f16" else "uint16"]
        arguments = (self.data, None, first * 16, rows, out, *(0, 0, 0), *self._work(0, kind, True))
        threads = rows * self.row_threads
        kernels("ternary")["ternary_rows"].launch(
            (-(-threads // 256),), 256, arguments, 0, stream, early=True
        )

    def quantize(self, x: Any, codes: Any, groups: Any, slots: int, stream: Any = None) -> None:
        """Activations -> 8-bit codes and groups, as ``ternary.cuh`` says.

        Parameters
        ----------
        x : cupy.ndarray of float16 or uint16, shape (tokens, in_features)
        codes : cupy.ndarray of int8, shape (tokens, in_features)
        groups : cupy.ndarray of 8 bytes an item, shape (in_features / 128, slots)
            Scale float32 and sum int32; those of slots beyond the tokens become zero.
        slots : int
            At least the tokens.
        stream : cupy.cuda.Stream, optional
        """
        kernel = kernels("ternary")[f"quantize_activations_{_ACTIVATIONS[x.dtype.name]}"]
        warps = -(-self.in_features // 128 * slots // 4)
        numbers = (x.shape[0], slots, self.in_features, x.data.ptr % 8 == 0)
        kernel.launch((-(-warps // 4),), 128, (x, codes, groups, *numbers), 0, stream, early=True)

    def multiply_quantized(
        self, codes: Any, groups: Any, slots: int, tokens: int, out: Any, stream: Any = None
    ) -> None:
        """``multiply`` for activations that :meth:`quantize` made; ``slots`` a multiple of 8."""
        bucket = next(b for b in self.buckets[1:] if tokens <= b)
        launch = self._launch("q8", bucket)
        common = self._common(launch, tokens, out, True)
        arguments = (self.data, None, codes, groups, slots, out, *common)
        launch.kernel.launch(launch.grid, launch.threads, arguments, launch.shared, stream, early=True)


LAYOUTS: dict[str, type[CudaLinear]] = {
    cls.layout: cls for cls in (TernaryLinear, Codebook4Linear, Codebook8Linear, AdditiveLinear)
}


def cuda_linear(
    layout: str,
    data: NDArray[np.uint8],
    rows: int,
    in_features: int,
    entries: int = 0,
    workspace: Workspace | None = None,
) -> CudaLinear:
    """Upload a planes tensor.

    Parameters
    ----------
    layout : str
        Of the file's description: a key of ``LAYOUTS``.
    data : ndarray of uint8
        The tensor, any shape.
    rows, in_features : int
    entries : int
        Codebook size, or number of codebooks; 0 for ternary.
    workspace : Workspace, optional
        Shared with other layers of the same stream; a new one by default.

    Raises
    ------
    KernelUnavailable
        If there is no card.
    ValueError
        If the layout is unknown.
    """
    cupy = import_cupy()
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r} has no CUDA kernels; {', '.join(LAYOUTS)} have")
    flat = cupy.asarray(np.ascontiguousarray(data).reshape(-1))
    return LAYOUTS[layout](flat, rows, in_features, entries, workspace or Workspace())
