"""AQLM checkpoints: each matrix as codes into additive codebooks, the layout of ``AdditiveTensor``.

For a module X, with M codebooks of 256 entries over groups of 8 inputs:

=================  ================  ===========================================================================
stored             shape             holds
=================  ================  ===========================================================================
``X.codes``        [out, in/8, M]    int8: entry 200 is stored as -56
``X.codebooks``    [M, 256, 1, 8]    float16, bfloat16 or float32
``X.scales``       [out, 1, 1, 1]    the same; one for each row
=================  ================  ===========================================================================

and ``X.weight[o, 8g + d] = scales[o] * sum over m of codebooks[m, codes[o, g, m], 0, d]``. The format also allows
other entry counts and groups (16-bit codes, two inputs, several outputs at once); no engine of ours serves
them, and they are refused by name.

Source: V. Egiazarian et al., "Extreme Compression of Large Language Models via Additive Quantization" (2024), and the
tensors that its HF integration stores.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trapetum.errors import UnsupportedModelError
from trapetum.formats.checkpoint import Checkpoint
from trapetum.formats.packed_checkpoint import PackedCheckpoint
from trapetum.tensors import AdditiveTensor, QuantizedTensor
from trapetum.tensors.additive import ENTRIES, GROUP, MAX_CODEBOOKS

__all__ = ["AqlmCheckpoint"]

_SHAPE = {"in_group_size": GROUP, "out_group_size": 1, "nbits_per_codebook": 8}
_FLOATS = ("float16", "bfloat16", "float32")


class AqlmCheckpoint(PackedCheckpoint):
    """AQLM with groups of 8 inputs and codes of 8 bits.

    Raises
    ------
    UnsupportedModelError
        If config.json names another shape of AQLM.
    CheckpointError
        If codes, codebooks and scales of a module do not belong together.
    """

    _format = "aqlm"

    def __init__(self, inner: Checkpoint) -> None:
        said = inner.config.get("quantization_config")
        settings: dict[str, Any] = said if isinstance(said, dict) else {}
        other = [f"{k} {settings[k]}" for k, v in _SHAPE.items() if settings.get(k, v) != v]
        if other:
            raise UnsupportedModelError(
                f"{inner.path}: quantized by aqlm with {', '.join(other)}; taken over is only what has "
                + ", ".join(f"{k} {v}" for k, v in _SHAPE.items()),
                hint="Use a checkpoint of the 2x8 kind (8-bit codes, groups of 8), or the one it was made from.",
            )
        super().__init__(inner)
        self.notes.append(f"packed as aqlm: {len(self._packed)} matrices are decoded exactly")

    def _find_packed(self) -> dict[str, tuple[int, ...]]:
        stored = set(self.inner.names())
        found: dict[str, tuple[int, ...]] = {}
        for codes in self.inner.names():
            if not codes.endswith(".codes"):
                continue
            (name,) = self._logical_names(codes)
            for companion in self._companions(name):
                if companion not in stored:
                    raise self._bad(codes, f"stands without {companion}")
            found[name] = self._checked_shape(name, codes)
        return found

    def _checked_shape(self, name: str, codes: str) -> tuple[int, int]:
        """Logical shape of a matrix whose three tensors belong together."""
        shape, dtype = self.inner.shape(codes), self.inner.dtype(codes)
        if dtype.name not in ("int8", "uint8") or len(shape) != 3:
            raise self._bad(codes, f"is {dtype.name} {list(shape)}; int8 [out, in/8, codebooks] is needed")
        rows, groups, count = shape
        wanted = {"codebooks": (count, ENTRIES, 1, GROUP), "scales": (rows, 1, 1, 1)}
        for companion in self._companions(name):
            expected = wanted[companion.rpartition(".")[2]]
            actual, kind = self.inner.shape(companion), self.inner.dtype(companion).name
            if actual != expected or kind not in _FLOATS:
                raise self._bad(
                    companion, f"is {kind} {list(actual)}; {list(expected)} of {', '.join(_FLOATS)} is needed"
                )
        if not 1 <= count <= MAX_CODEBOOKS:
            raise self._bad(codes, f"has {count} codebooks; 1 to {MAX_CODEBOOKS} are allowed")
        return rows, GROUP * groups

    def _stored_name(self, name: str) -> str:
        stem = name.removesuffix(".weight")
        codes = f"{stem}.codes"
        return codes if stem != name and name in self._packed else name

    def _logical_names(self, stored: str) -> tuple[str, ...]:
        return (f"{stored.removesuffix('.codes')}.weight" if stored.endswith(".codes") else stored,)

    def _companions(self, name: str) -> tuple[str, ...]:
        stem = name.removesuffix(".weight")
        return f"{stem}.codebooks", f"{stem}.scales"

    def stored(self, name: str, rows: slice | None = None) -> AdditiveTensor:
        """The codes, codebooks and scales of a matrix or of some rows of it, as they are.

        What is bfloat16 becomes float32, which holds it exactly.

        Raises
        ------
        CheckpointError
            If the tensor is not packed.
        """
        if name not in self._packed:
            raise self._bad(name, "is not packed as aqlm")
        total, width = self._packed[name]
        start, stop, _ = (rows or slice(None)).indices(total)
        groups, stop = width // GROUP, max(start, stop)
        codes = self._stored_name(name)
        books, scales = self._companions(name)
        count = self.inner.shape(codes)[2]
        found = self.inner.load(codes, slice(start * groups, stop * groups)).values.view(np.uint8)
        return AdditiveTensor(
            np.ascontiguousarray(found.reshape(stop - start, groups, count).transpose(2, 1, 0)),
            _widened(self.inner.load(books).values).reshape(-1, ENTRIES, GROUP),
            _widened(self.inner.load(scales, slice(start, stop)).values).reshape(-1),
        )

    def compact(self, name: str, rows: slice | None = None) -> QuantizedTensor:
        """See :meth:`PackedCheckpoint.compact`."""
        return self.stored(name, rows) if self.is_packed(name) else self.load(name, rows)

    def _decode(self, name: str, rows: slice) -> NDArray[np.float32]:
        return self.stored(name, rows).dequantize(slice(None))


def _widened(values: NDArray[Any]) -> NDArray[Any]:
    return values.astype(np.float32) if values.dtype.name == "bfloat16" else np.asarray(values)
