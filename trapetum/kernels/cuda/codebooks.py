"""Codebook and additive matrices on the card."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trapetum.formats import tiles
from trapetum.kernels.cuda.base import ACTIVATIONS, CudaLinear, Tuning
from trapetum.kernels.cuda.module import card, kernels
from trapetum.kernels.cuda.workspace import Workspace

__all__ = ["AdditiveLinear", "Codebook4Linear", "Codebook8Linear"]


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
        activations = ACTIVATIONS[x.dtype.name]
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
    buckets = (2, 4, 8)
    family = source = "codebook4"
    whole_inputs = 16
    tuning: Mapping[int, Tuning] = {2: Tuning(512, 2), 4: Tuning(512, 2), 8: Tuning(512, 1)}

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
