"""What ``bench`` times: random matrices of every scheme, in pools larger than the last cache, and their yardsticks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from trapetum.errors import KernelUnavailable
from trapetum.kernels.cpu import pages
from trapetum.kernels.cpu.pool import Pool

if TYPE_CHECKING:
    from trapetum.kernels.cpu.prepared import Prepared
    from trapetum.runtime.matrix import PreparedMatrix

__all__ = [
    "BLAS",
    "POOL_BYTES",
    "READ",
    "SCHEMES",
    "Case",
    "blas_case",
    "matrix_cases",
    "random_blocks",
    "read_case",
]

POOL_BYTES = 256 << 20
BLAS, READ = "fp32 BLAS", "read"
_CACHED_BYTES = 2 << 20
_BLOCK_ROWS = 128


@dataclass(frozen=True)
class Case:
    """One thing to time.

    Parameters
    ----------
    name : str
    weights : int
        Weights multiplied in a run, for each token.
    nbytes : int
        Bytes of weights read in a run.
    run : callable
        Receives the number of the round.
    """

    name: str
    weights: int
    nbytes: int
    run: Callable[[int], object]


# ---------------------------------------------------------------------------- random matrices
def _codebook(rows: int, count: int, entries: int, expand: bool = False) -> Prepared:
    from trapetum.kernels.cpu.prepare import prepare
    from trapetum.tensors import CodebookTensor

    rng = np.random.default_rng(0)
    codes = rng.integers(0, entries, (rows, count), dtype=np.uint8)
    table = np.sort(rng.standard_normal((rows, entries)), axis=1).astype(np.float16)
    return _found(prepare(CodebookTensor(codes, table), expand=expand))


def _ternary(rows: int, count: int, precise: bool = False) -> Prepared:
    from trapetum.kernels.cpu.prepare import prepare
    from trapetum.tensors import TernaryTensor

    rng = np.random.default_rng(0)
    codes = rng.integers(0, 3, (rows, count), dtype=np.uint8)
    scales = rng.uniform(0.01, 0.02, (rows, count // 128)).astype(np.float16)
    return _found(prepare(TernaryTensor(codes, scales), precise=precise))


def _additive(rows: int, count: int) -> Prepared:
    from trapetum.kernels.cpu.prepared import Additive

    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (2, count // 8, rows), dtype=np.uint8)
    books = rng.standard_normal((2, 256, 8)).astype(np.float16)
    return Additive(codes, books, np.ones(rows, np.float16))


def random_blocks(name: str, rows: int, count: int) -> NDArray[np.uint8]:
    """Rows of blocks of a GGUF type with random codes and small scales, uint8 [rows, row bytes]."""
    from trapetum.blocktypes import BLOCK_TYPES

    kind, rng = BLOCK_TYPES[name], np.random.default_rng(0)
    blocks = rng.integers(0, 256, (rows * count // kind.block_size, kind.type_size), dtype=np.uint8)
    for field, part in kind.split(blocks).items():
        if field in ("d", "dmin"):
            part[:] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    return blocks.reshape(rows, -1)


def _blocks(name: str) -> Callable[[int, int], Prepared]:
    def build(rows: int, count: int) -> Prepared:
        from trapetum.kernels.cpu.prepare import prepare
        from trapetum.tensors import BlockTensor

        return _found(prepare(BlockTensor(name, random_blocks(name, rows, count))))

    return build


def _found(prepared: Prepared | None) -> Prepared:
    if prepared is None:
        raise KernelUnavailable("no kernel takes this matrix")
    return prepared


SCHEMES: dict[str, Callable[[int, int], Prepared]] = {
    "codebook K=16": lambda rows, count: _codebook(rows, count, 16),
    "codebook K=256": lambda rows, count: _codebook(rows, count, 256),
    "codebook K=256 expanded": lambda rows, count: _codebook(rows, count, 256, True),
    "ternary": _ternary,
    "ternary precise": lambda rows, count: _ternary(rows, count, True),
    "additive 2x8": _additive,
    **{name: _blocks(name) for name in ("Q2_0", "Q4_0", "IQ4_NL", "Q4_K", "Q6_K", "Q8_0")},
}


# ---------------------------------------------------------------------------- cases
def _copies(matrix: Prepared, pool_bytes: int) -> list[Prepared]:
    made = []
    for _ in range(max(2, -(-pool_bytes // _weight_bytes(matrix)))):
        one = copy.copy(matrix)
        for key, value in vars(matrix).items():
            if isinstance(value, np.ndarray):
                setattr(one, key, pages.copy(value))
        made.append(one)
    return made


def _weight_bytes(matrix: Prepared) -> int:
    """Bytes that a product reads: an expanded matrix leaves its codes and tables alone."""
    from trapetum.kernels.cpu.prepared import Expanded

    return matrix.words.nbytes if isinstance(matrix, Expanded) else matrix.nbytes


def matrix_cases(
    name: str, rows: int, count: int, tokens: int, pool: Pool, pool_bytes: int = POOL_BYTES
) -> list[Case]:
    """A scheme's product with weights from memory and, of few tokens, from the cache: ``"NAME cached"``.

    One token goes the way of a decoding step (``kernels.cpu.program``), more go that of a prompt.
    """
    from trapetum.runtime.matrix import FUSED_TOKENS, PreparedMatrix

    build = _program_case if tokens == 1 else _call_case
    x = np.random.default_rng(1).standard_normal((tokens, count)).astype(np.float32)

    def case(label: str, prepared: Sequence[Prepared], repeat: int) -> Case:
        matrices = [PreparedMatrix(one, pool, fused=True) for one in prepared]
        weights, nbytes = prepared[0].rows * count * repeat, _weight_bytes(prepared[0]) * repeat
        return Case(label, weights, nbytes, build(matrices, x, repeat, pool))

    copies = _copies(SCHEMES[name](rows, count), pool_bytes)
    cases = [case(name, copies, 1)]
    if tokens <= FUSED_TOKENS:
        few = max(_BLOCK_ROWS * pool.threads, _CACHED_BYTES * rows // _weight_bytes(copies[0]))
        cases.append(case(f"{name} cached", [SCHEMES[name](few, count)], max(1, rows // few)))
    return cases


def _program_case(
    matrices: Sequence[PreparedMatrix], x: NDArray[np.float32], repeat: int, pool: Pool
) -> Callable[[int], object]:
    from trapetum.runtime.layers import Linear
    from trapetum.runtime.products import add_products
    from trapetum.runtime.program import Program

    programs, program = [], None
    for matrix in matrices:
        program = Program(pool, like=program)
        out = np.empty((repeat, matrix.rows), np.float32)
        add_products(program, x[0], [(Linear(matrix), y) for y in out])
        programs.append(program.runner())
    return lambda number: programs[number % len(programs)]()


def _call_case(
    matrices: Sequence[PreparedMatrix], x: NDArray[np.float32], repeat: int, pool: Pool
) -> Callable[[int], object]:
    def run(number: int) -> None:
        for _ in range(repeat):
            matrices[number % len(matrices)](x)

    return run


def blas_case(rows: int, count: int, tokens: int, pool_bytes: int = POOL_BYTES) -> Case:
    """``x @ W.T`` in float32 by NumPy, with as many threads as BLAS is allowed."""
    rng = np.random.default_rng(2)
    size = max(2, -(-pool_bytes // (4 * rows * count)))
    weights = [rng.standard_normal((rows, count), np.float32) for _ in range(size)]
    x = rng.standard_normal((tokens, count), np.float32)
    out = np.empty((tokens, rows), np.float32)
    return Case(
        BLAS, rows * count, 4 * rows * count, lambda number: np.matmul(x, weights[number % size].T, out=out)
    )


def read_case(pool: Pool, pool_bytes: int = POOL_BYTES) -> Case:
    """A plain read of a pool of memory by all threads."""
    from trapetum.kernels.cpu.bandwidth import read

    each = 1 << 20
    words = np.ones(-(-pool_bytes // 4 // each) * each, np.int32)
    return Case(
        READ, 0, words.nbytes, lambda _: pool.blocks(lambda r: read(words, r.start, r.stop), words.size, each)
    )
