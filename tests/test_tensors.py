"""Packing and the QuantizedTensor family against worked bytes and plain loops."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trapetum.packing import pack_bits, packed_row_bytes, unpack_bits
from trapetum.tensors import LAYOUTS, CodebookTensor, DenseTensor, matrix_shape

# Bits of the stream, code after code, lowest bit first, then cut into bytes: worked by hand for codes 1, 2, 3, 0, 1.
GOLDEN = {2: "3901", 3: "d110", 4: "210301", 5: "410c1000", 6: "81300001", 8: "0102030001"}


@pytest.mark.parametrize("bits", sorted(GOLDEN))
def test_golden_bytes(bits: int) -> None:
    codes = np.array([[1, 2, 3, 0, 1]], np.uint8)
    stream = sum(int(c) << (i * bits) for i, c in enumerate(codes[0]))
    by_hand = stream.to_bytes(packed_row_bytes(5, bits), "little").hex()
    assert by_hand == GOLDEN[bits]
    assert pack_bits(codes, bits).tobytes().hex() == GOLDEN[bits]


@given(st.integers(1, 8), st.integers(0, 5), st.integers(0, 70), st.randoms(use_true_random=False))
def test_unpack_undoes_pack(bits: int, rows: int, count: int, random) -> None:
    codes = np.array([[random.randrange(2**bits) for _ in range(count)] for _ in range(rows)], np.uint8)
    codes = codes.reshape(rows, count)
    assert np.array_equal(unpack_bits(pack_bits(codes, bits), bits, count), codes)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 7])
def test_a_code_that_does_not_fit_is_refused_not_wrapped(bits: int) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        pack_bits(np.array([[2**bits]], np.uint8), bits)


def test_row_length_is_checked() -> None:
    with pytest.raises(ValueError, match="need 2"):
        unpack_bits(np.zeros((1, 3), np.uint8), 4, 4)


def test_codebook_decode_equals_the_plain_loop() -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (6, 9), dtype=np.uint8)
    book = rng.normal(size=(6, 16)).astype(np.float16)
    tensor = CodebookTensor(codes, book, (2, 3, 9))
    expected = [[float(book[o, codes[o, i]]) for i in range(9)] for o in range(6)]
    assert tensor.dequantize().shape == (2, 3, 9)
    assert tensor.dequantize().reshape(6, 9).tolist() == expected
    assert tensor.dequantize(slice(1, 3)).tolist() == expected[1:3]
    assert tensor.nbytes == 6 * 5 + 6 * 32
    assert tensor.nbits_per_weight == pytest.approx(8 * tensor.nbytes / 54)


@pytest.mark.parametrize("size", [4, 8, 16, 32, 64, 256])
def test_arrays_round_trip(size: int) -> None:
    rng = np.random.default_rng(size)
    tensor = CodebookTensor(
        rng.integers(0, size, (3, 7), dtype=np.uint8), rng.normal(size=(3, size)).astype(np.float32)
    )
    again = LAYOUTS["codebook"].from_arrays(tensor.to_arrays(), tensor.shape, tensor.params())
    assert np.array_equal(again.dequantize(), tensor.dequantize())
    assert sum(a.nbytes for a in tensor.to_arrays().values()) == tensor.nbytes


@pytest.mark.parametrize(
    ("codes", "codebook", "word"),
    [
        (np.zeros((2, 3), np.uint8), np.zeros((3, 4), np.float16), "rows"),
        (np.zeros((2, 3), np.uint8), np.zeros((2, 4), np.float64), "float64"),
        (np.zeros((2, 3), np.int8), np.zeros((2, 4), np.float16), "uint8"),
        (np.zeros((2, 3), np.uint8), np.zeros((2, 1), np.float16), "codebook_size"),
    ],
)
def test_arrays_that_do_not_belong_together_are_refused(codes, codebook, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        CodebookTensor(codes, codebook)


def test_a_code_without_an_entry_is_refused() -> None:
    arrays = {"codes": np.array([[7]], np.uint8), "codebook": np.zeros((1, 5), np.float16)}
    with pytest.raises(ValueError, match="no entry"):
        CodebookTensor.from_arrays(arrays, (1, 1), {"codebook_size": 5})


def test_dense_keeps_its_dtype_and_scalar_shape() -> None:
    tensor = DenseTensor(np.array(2.5, ml_dtypes.bfloat16))
    assert tensor.dequantize().shape == ()
    assert float(tensor.dequantize()) == 2.5
    assert tensor.to_arrays()[""].dtype == ml_dtypes.bfloat16
    assert matrix_shape(tensor.shape) == (1, 1)
