"""The additive layout: bytes by hand, what is refused, and parts that are written row block by row block."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from trapetum.errors import FormatError
from trapetum.formats.parts import PartWriter
from trapetum.formats.safetensors import SafetensorsFile
from trapetum.formats.stored_arrays import array_rule
from trapetum.kernels.cpu.prepare import prepare
from trapetum.tensors import LAYOUTS, AdditiveTensor

RNG = np.random.default_rng(3)


def tensor(rows: int = 5, groups: int = 3, books: int = 2) -> AdditiveTensor:
    return AdditiveTensor(
        RNG.integers(0, 256, (books, groups, rows), np.uint8),
        RNG.standard_normal((books, 256, 8)).astype(np.float16),
        RNG.standard_normal(rows).astype(np.float16),
    )


def test_stored_bytes() -> None:
    books = np.zeros((2, 256, 8), np.float16)
    books[0, 5], books[0, 0], books[1, 7], books[1, 4] = 1, 2, 0.25, 0.5
    made = AdditiveTensor(np.array([[[5], [0]], [[7], [4]]], np.uint8), books, np.array([2], np.float16))
    arrays = made.to_arrays()
    assert arrays["codes"].tobytes().hex() == "05070004"
    assert arrays["scales"].tobytes().hex() == "0040"
    assert made.dequantize().tolist() == [[2.5] * 8 + [5.0] * 8]
    again = AdditiveTensor.from_arrays(arrays, (1, 16), {"num_codebooks": 2})
    assert np.array_equal(again.codes, made.codes)


@pytest.mark.parametrize(
    ("shape", "params", "message"),
    [
        ((4, 12), {"num_codebooks": 2}, "rows of 12 are not whole groups of 8"),
        ((4, 16), {"num_codebooks": 0}, "num_codebooks is 0"),
        ((4, 16), {"num_codebooks": True}, "num_codebooks is True"),
        ((4, 16), {}, "num_codebooks is None"),
    ],
)
def test_wrong_params_are_refused(shape: tuple[int, ...], params: dict[str, object], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        array_rule("additive", shape, params)


def test_rules_are_the_arrays() -> None:
    made = tensor()
    rule = array_rule("additive", made.shape, made.params())
    assert {s: a.shape for s, a in made.to_arrays().items()} == {s: shape for s, (_, shape) in rule.items()}


def test_row_blocks_make_the_part_of_the_whole(tmp_path: Path) -> None:
    made = tensor(rows=9)
    arrays = made.to_arrays()
    shared = LAYOUTS["additive"].shared
    with PartWriter(tmp_path, 0, "w", {s: (a.dtype, a.shape) for s, a in arrays.items()}) as part:
        for start in range(0, 9, 4):
            rows = slice(start, start + 4)
            part.write({s: a[rows] if s not in shared else a[:0] if start else a for s, a in arrays.items()})
        part.finish(
            {"layout": "additive", "shape": (9, 24), "params": made.params(), "scheme": {"name": "x"}}
        )
        path = part.path
    with SafetensorsFile.open(path) as file:
        for suffix, array in arrays.items():
            assert file.read(f"w.{suffix}").tobytes() == array.tobytes()


def test_the_kernel_decodes_the_same_bits() -> None:
    made = tensor(rows=21, groups=19, books=3)
    prepared = prepare(made)
    assert prepared is not None
    out = np.empty((20, made.in_features), np.float32)
    prepared.decode(out, 1)
    assert out.tobytes() == made.dequantize(slice(1, 21)).tobytes()
