"""Memory for weights: right shapes, no overlap, cache lines, slabs freed with their arrays."""

from __future__ import annotations

import mmap
import threading
import weakref
from itertools import pairwise

import numpy as np
import pytest

from trapetum.kernels.cpu import pages


@pytest.mark.parametrize("shape", [(0,), 3, (300, 1000), (3, 5, 70001), (70 << 20,)])
@pytest.mark.parametrize("kind", [np.uint8, np.float16, np.int64])
def test_arrays_are_like_those_of_numpy(shape: int | tuple[int, ...], kind: type) -> None:
    made, like = pages.empty(shape, kind), np.empty(shape, kind)
    assert (made.shape, made.dtype, made.strides) == (like.shape, like.dtype, like.strides)
    assert made.flags.c_contiguous
    assert made.flags.writeable
    if made.nbytes >= 1 << 16 and hasattr(mmap, "MADV_HUGEPAGE"):
        assert made.ctypes.data % 64 == 0


def test_no_two_arrays_share_memory() -> None:
    made: list[np.ndarray] = []

    def work(seed: int) -> None:
        for size in np.random.default_rng(seed).integers(1 << 16, 3 << 20, 40).tolist():
            made.append(pages.empty(size, np.uint8))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spans = sorted((a.ctypes.data, a.ctypes.data + a.nbytes) for a in made)
    assert len(spans) == 160
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="no large pages here")
@pytest.mark.parametrize("nbytes", [100 << 20, 20 << 20])
def test_memory_goes_with_the_last_array(nbytes: int) -> None:
    first = pages.empty(nbytes, np.uint8)
    held = first.base
    while getattr(held, "base", None) is not None and isinstance(held.base, np.ndarray):
        held = held.base
    gone = weakref.ref(held)
    part = first[5:10]
    del first, held
    assert gone() is not None
    del part
    if nbytes < 32 << 20:  # a slab that is still in use: until the next one
        for _ in range(3):
            pages.empty(31 << 20, np.uint8)
    assert gone() is None


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="no large pages here")
def test_a_full_machine_is_a_memory_error() -> None:
    with pytest.raises(MemoryError):
        pages.empty(1 << 60, np.uint8)


def test_copies_are_equal() -> None:
    array = np.random.default_rng(0).standard_normal((321, 654)).astype(np.float16)
    np.testing.assert_array_equal(pages.copy(array), array)
