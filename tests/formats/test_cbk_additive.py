"""The CBKA record against bytes made by hand."""

from __future__ import annotations

import numpy as np
import pytest

from trapetum.errors import FormatError
from trapetum.formats.cbk_additive import parse_additive, record_parts
from trapetum.tensors import AdditiveTensor

HEADER = bytes.fromhex("43424b41 02000000 08000000 00010000 04000000 10000000")
ENTRY_0_5 = bytes.fromhex("0000 003c 0040 0042 0044 0045 0046 0047")  # 0 .. 7
ENTRY_1_7 = bytes.fromhex("0034") * 8
SCALES = bytes.fromhex("003c 0040 0038 00bc")
CODES = bytes.fromhex("05050005 00010203 07000707 04050609")


def golden() -> bytes:
    books = bytearray(8192)
    books[0x68 - 24 : 0x68 - 24 + 16] = ENTRY_0_5
    books[0x1088 - 24 : 0x1088 - 24 + 16] = ENTRY_1_7
    return HEADER + bytes(books) + SCALES + CODES


def test_golden_record() -> None:
    data = golden()
    assert len(data) == 8240
    tensor = parse_additive(data + b"next", "x.cbk: w")
    weight = tensor.dequantize()
    assert weight.shape == (4, 16)
    assert weight[0, :8].tolist() == [0.25 + d for d in range(8)]
    assert weight[1, :8].tolist() == [2.0 * d for d in range(8)]
    assert weight[3, :8].tolist() == [-0.25 - d for d in range(8)]
    assert b"".join(part.tobytes() for part in record_parts(tensor)) == data


def test_float32_scales_are_taken_where_float16_holds_them() -> None:
    tensor = parse_additive(golden(), "w")
    wide = AdditiveTensor(tensor.codes, tensor.codebooks, tensor.scales.astype(np.float32))
    assert b"".join(part.tobytes() for part in record_parts(wide)) == golden()
    odd = AdditiveTensor(tensor.codes, tensor.codebooks, np.full(4, 0.1, np.float32))
    with pytest.raises(ValueError, match="scales have float32 values"):
        list(record_parts(odd))


@pytest.mark.parametrize("at", range(24))
def test_a_wrong_header_is_refused(at: int) -> None:
    data = bytearray(golden())
    data[at] ^= 0x81
    with pytest.raises(FormatError, match=r"x\.cbk: w"):
        parse_additive(bytes(data), "x.cbk: w")


@pytest.mark.parametrize("length", [0, 3, 23, 24, 4000, 8239])
def test_a_cut_record_is_refused(length: int) -> None:
    with pytest.raises(FormatError, match="cut off"):
        parse_additive(golden()[:length], "w")


def test_forms_that_the_runtime_does_not_take() -> None:
    books = np.zeros((4, 256, 8), np.float16)
    with pytest.raises(ValueError, match="4 codebooks; 2 and 3"):
        list(record_parts(AdditiveTensor(np.zeros((4, 1, 4), np.uint8), books, np.ones(4, np.float16))))
