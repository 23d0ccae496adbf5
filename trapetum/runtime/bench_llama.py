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
from trapetum.kernels.cpu import memory, pages
from trapetum.kernels.cpu.pool import Pool
from trapetum.runtime.bench_cases import Case, random_blocks
from trapetum.runtime.products import product_tile
from trapetum.runtime.program import Program

__all__ = ["LLAMA_TYPES", "llama_cases", "llama_product"]

SIMD = "ce3020bb72a775c0"  # simd.fingerprint(): a new one makes numba compile this file again

LLAMA_TYPES = ("Q4_0", "IQ4_NL", "Q4_K", "Q6_K", "Q8_0", "TQ2_0", "Q2_0")


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
    one = random_blocks(name, rows, count)
    copies = [pages.copy(one) for _ in range(max(2, -(-pool_bytes // one.nbytes)))]
    x = np.random.default_rng(1).standard_normal(count).astype(np.float32)
    out = np.empty(rows, np.float32)
    programs = [_program(traits, kind, weights, x, out, pool).runner() for weights in copies]
    return Case(
        f"llama.cpp {name}", rows * count, one.nbytes, lambda number: programs[number % len(programs)]()
    )


def _program(
    traits: Callable[[int], _Traits], kind: _Traits, weights: NDArray[np.uint8], x: NDArray[np.float32],
    out: NDArray[np.float32], pool: Pool,
) -> Program:  # fmt: skip
    """Its product of one token, handed out to threads as ours is."""
    other, rows = traits(kind.vec_dot_type), len(weights)
    if kind.vec_dot is None or other.from_float is None:
        raise KernelUnavailable("llama.cpp has no row product for this type")
    q = np.empty(BLOCK_TYPES_BY_ID[kind.vec_dot_type].row_bytes(x.size), np.uint8)
    program = Program(pool)
    program.add(_quantize_step, [other.from_float, x, q, x.size])
    arguments = [kind.vec_dot, weights, weights.shape[1], q, x.size, out]
    program.add(_rows_step, arguments, rows, product_tile(rows, x.size, pool.threads))
    return program


def _quantize_step(a: Any, begin: int, end: int) -> None:
    """Address of ``from_float``, x, q, count: ``from_float(x, q, count)``."""
    memory.call(a[0], a[1], a[2], a[3])


def _rows_step(a: Any, begin: int, end: int) -> None:
    """Address of ``vec_dot``, weights, bytes of a row, x, count, out; works on rows begin .. end - 1."""
    for o in range(begin, end):
        memory.row_product(a[0], a[4], a[5] + 4 * o, a[1] + o * a[2], a[3])


def llama_product(name: str, blocks: NDArray[np.uint8], x: NDArray[np.float32]) -> NDArray[np.float32]:
    """``blocks @ x`` by llama.cpp, float32 [rows] from uint8 [rows, row bytes]: what tests compare with."""
    traits = _load()
    kind = traits(BLOCK_TYPES[name].id)
    out = np.empty(len(blocks), np.float32)
    _program(traits, kind, np.ascontiguousarray(blocks), np.ascontiguousarray(x), out, Pool(1)).runner()()
    return out
