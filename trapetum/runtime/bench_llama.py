"""llama.cpp's own row products, called from compiled code on the same pools as ours.

PyPI ``xllamacpp`` carries ggml in its extension module and exports ``ggml_get_type_traits_cpu``; the row products
behind it are what llama.cpp multiplies a token with on a CPU. The activations are quantized by its own routine, once
a product, as it does.

Source: llama.cpp, ggml/include/ggml-cpu.h (``ggml_type_traits_cpu``).
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trapetum.blocktypes import BLOCK_TYPES, BLOCK_TYPES_BY_ID
from trapetum.errors import KernelUnavailable
from trapetum.kernels.cpu.pool import Pool
from trapetum.runtime.bench_cases import Case, random_blocks

__all__ = ["LLAMA_TYPES", "llama_cases", "llama_product"]

LLAMA_TYPES = ("Q4_0", "IQ4_NL", "Q4_K", "Q6_K", "Q8_0", "TQ2_0", "Q2_0")
_BLOCK_ROWS = 128

_FROM_FLOAT = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
_VEC_DOT = ctypes.CFUNCTYPE(
    None, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p,
    ctypes.c_size_t, ctypes.c_int,
)  # fmt: skip


class _Traits(ctypes.Structure):
    _fields_ = (
        ("from_float", ctypes.c_void_p),
        ("vec_dot", ctypes.c_void_p),
        ("vec_dot_type", ctypes.c_int),
        ("nrows", ctypes.c_int64),
    )


def llama_cases(types: Sequence[str], rows: int, count: int, pool: Pool, pool_bytes: int) -> list[Case]:
    """One case a type, some of ``LLAMA_TYPES``, named ``"llama.cpp TYPE"``.

    Raises
    ------
    KernelUnavailable
        If ``xllamacpp`` is not installed or does not export its kernels.
    """
    traits = _load() if types else None
    return [] if traits is None else [_case(traits, name, rows, count, pool, pool_bytes) for name in types]


def _load() -> Callable[[int], _Traits]:
    spec = importlib.util.find_spec("xllamacpp")
    folder = None if spec is None or spec.origin is None else Path(spec.origin).parent
    files = [] if folder is None else sorted(folder.glob("*.so"))
    if not files:
        raise KernelUnavailable("xllamacpp is not installed, so llama.cpp's kernels are not timed")
    try:
        library = ctypes.CDLL(str(files[0]))
        library.ggml_cpu_init()  # fills the float16 tables
        function = library.ggml_get_type_traits_cpu
    except (OSError, AttributeError) as error:
        raise KernelUnavailable(f"{files[0].name} does not export llama.cpp's kernels: {error}") from error
    function.restype, function.argtypes = ctypes.POINTER(_Traits), [ctypes.c_int]

    def traits(type_id: int) -> _Traits:
        found: _Traits = function(type_id).contents
        return found

    return traits


def _case(
    traits: Callable[[int], _Traits], name: str, rows: int, count: int, pool: Pool, pool_bytes: int
) -> Case:
    kind = traits(BLOCK_TYPES[name].id)
    other = traits(kind.vec_dot_type)
    row_bytes = BLOCK_TYPES[name].row_bytes(count)
    one = random_blocks(name, rows, count)
    copies = [one.copy() for _ in range(max(2, -(-pool_bytes // one.nbytes)))]
    x = np.random.default_rng(1).standard_normal(count).astype(np.float32)
    q = np.empty(BLOCK_TYPES_BY_ID[kind.vec_dot_type].row_bytes(count), np.uint8)
    out = np.empty(rows, np.float32)
    quantize, loop = _FROM_FLOAT(other.from_float), _loop(kind.vec_dot)

    def run(number: int) -> None:
        weights = copies[number % len(copies)]
        quantize(x.ctypes.data, q.ctypes.data, count)

        def piece(r: slice) -> None:
            loop(weights.ctypes.data, row_bytes, q.ctypes.data, count, out.ctypes.data, r.start, r.stop)

        pool.blocks(piece, rows, _BLOCK_ROWS)

    return Case(f"llama.cpp {name}", rows * count, one.nbytes, run)


def _loop(address: int | None) -> Callable[..., Any]:
    """A compiled loop over rows around a row product; not cached, because the address is a constant in it."""
    import numba

    if address is None:
        raise KernelUnavailable("llama.cpp has no row product for this type")
    vec_dot = _VEC_DOT(address)

    def loop(weights: int, row_bytes: int, x: int, count: int, out: int, begin: int, end: int) -> None:
        for o in range(begin, end):
            vec_dot(count, out + 4 * o, 0, weights + o * row_bytes, 0, x, 0, 1)

    compiled: Callable[..., Any] = numba.njit(nogil=True)(loop)
    return compiled


def llama_product(name: str, blocks: NDArray[np.uint8], x: NDArray[np.float32]) -> NDArray[np.float32]:
    """``blocks @ x`` by llama.cpp, float32 [rows] from uint8 [rows, row bytes]: what tests compare with."""
    traits = _load()
    kind = traits(BLOCK_TYPES[name].id)
    other = traits(kind.vec_dot_type)
    q = np.empty(BLOCK_TYPES_BY_ID[kind.vec_dot_type].row_bytes(x.size), np.uint8)
    out = np.empty(len(blocks), np.float32)
    _FROM_FLOAT(other.from_float)(x.ctypes.data, q.ctypes.data, x.size)
    loop = _loop(kind.vec_dot)
    loop(blocks.ctypes.data, blocks.shape[1], q.ctypes.data, x.size, out.ctypes.data, 0, len(blocks))
    return out
