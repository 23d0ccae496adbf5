"""Ternary and four-level matrices on the card: activations of 8 bits, integer products."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from trapetum.formats import planes
from trapetum.kernels.cuda.base import ACTIVATIONS, KINDS, CudaLinear, Tuning, out_kind
from trapetum.kernels.cuda.module import card, kernels

__all__ = ["TernaryLinear"]

# Four stages of 128 x 128 codes and 128 scales, and their barriers.
_GEMM_SHARED = 4 * (128 * 128 + 1024) + 64


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

    def _first_and_count(self, count: int) -> tuple[int, ...]:
        """See :meth:`CudaLinear._first_and_count`."""
        return 0, count

    @property
    def row_threads(self) -> int:
        """A thread a word of codes."""
        return self.in_features // 16

    def _multiply_few(self, x: Any, out: Any, stream: Any) -> None:
        tokens = x.shape[0]
        activations = ACTIVATIONS[x.dtype.name]
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
        quantize = found[f"quantize_tiles_{ACTIVATIONS[x.dtype.name]}"]
        quantize.launch((-(-groups_of_all // 32),), 256, (x, codes, groups, *numbers), 0, stream, early=True)
        arguments = (self.data, codes, groups, out, 0, 0, 0, *self._work(tokens, out_kind(out), True))
        found["ternary_gemm"].launch(
            (tiles, -(-self.rows // 128)), 288, arguments, _GEMM_SHARED, stream, early=True
        )

    def _decode_tiles(self, first: int, count: int, out: Any, activations: str, stream: Any) -> None:
        """See :meth:`CudaLinear._decode_tiles`."""
        rows = min(count * 16, self.rows - first * 16)
        kind = KINDS["float16" if activations == "f16" else "uint16"]
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
        kernel = kernels("ternary")[f"quantize_activations_{ACTIVATIONS[x.dtype.name]}"]
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
