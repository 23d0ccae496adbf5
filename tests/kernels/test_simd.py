"""The vector vocabulary: every operation against NumPy, on this CPU and on one without AVX2."""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest

import trapetum.kernels.cpu
from trapetum.kernels.cpu import simd


def test_kernel_files_carry_the_fingerprint() -> None:
    # numba's cache looks at a kernel's own file only: an edit of simd.py must reach every one of them
    users = []
    for info in pkgutil.iter_modules(trapetum.kernels.cpu.__path__):
        source = Path(trapetum.kernels.cpu.__path__[0], f"{info.name}.py").read_text()
        if re.search(
            r"^from trapetum\.kernels\.cpu(\.memory)? import .*\b(simd|memory|array)\b", source, re.MULTILINE
        ):
            module = importlib.import_module(f"trapetum.kernels.cpu.{info.name}")
            assert module.SIMD == simd.fingerprint(), f"{info.name}.SIMD must be {simd.fingerprint()!r}"
            users.append(info.name)
    assert {"codebook16", "codebook_table", "ternary", "blocks", "additive"} <= set(users)


@numba.njit
def _bytes(a, b, out):  # type: ignore[no-untyped-def]
    """Every operation on bytes and words, made visible as float32."""
    x, y = simd.load_bytes(a, 0), simd.load_bytes(a, 32)
    nibble = simd.and_bytes(x, simd.splat_bytes(15))
    found = simd.look_up_bytes(simd.load_table(b, 3), nibble)
    low, high = simd.interleave_low(found, simd.zero_bytes()), simd.interleave_high(x, y)
    simd.store_floats(out, 0, simd.to_floats(simd.low_ints(low)))
    simd.store_floats(out, 8, simd.to_floats(simd.high_ints(low)))
    simd.store_floats(out, 16, simd.to_floats(simd.low_ints(high)))
    simd.store_floats(out, 24, simd.to_floats(simd.high_ints(high)))
    shifted = simd.or_bytes(
        simd.shift_right_bytes(x, simd.splat_bytes(4)), simd.shift_left_bytes(y, simd.splat_bytes(2))
    )
    words = simd.add_words(simd.interleave_low(shifted, simd.zero_bytes()), simd.splat_words(-7))
    simd.store_floats(out, 32, simd.to_floats(simd.multiply_add_words(words, simd.load_signed_bytes(a, 5))))
    u = simd.and_bytes(simd.add_bytes(x, y), simd.splat_bytes(31))
    ints = simd.load_ints(a.view(np.int32), 1)
    dot = simd.dot_bytes(ints, u, nibble, u, nibble, x, y, simd.load_bytes(a, 64), x)
    simd.store_floats(out, 40, simd.to_floats(dot))
    simd.store_floats(out, 48, simd.to_floats(simd.add_ints(ints, simd.load_byte_ints(a, 9))))
    simd.prefetch(a, 1 << 30)


def test_operations_on_integers() -> None:
    rng = np.random.default_rng(0)
    a = rng.integers(0, 256, 96, dtype=np.uint8)
    a[:64:9] = 255  # int8 -1, and the largest unsigned sums
    b = rng.integers(0, 256, 19, dtype=np.uint8)
    out = np.zeros(56, np.float32)
    _bytes(a, b, out)
    x, y, z = a[:32], a[32:64], a[64:96]
    low, high = [*range(8), *range(16, 24)], [*range(8, 16), *range(24, 32)]
    np.testing.assert_array_equal(out[:16], b[3:19][x & 15][low])
    pairs = (x.astype(np.uint16) | y.astype(np.uint16) << 8).view(np.int16)
    np.testing.assert_array_equal(out[16:32], pairs[high])
    words = ((x >> 4) | (y << np.uint8(2)))[low].astype(np.int64) - 7
    products = words * a[5:21].view(np.int8)
    np.testing.assert_array_equal(out[32:40], products.reshape(8, 2).sum(1).astype(np.float32))
    u, nibble = (x + y) & 31, x & 15
    total = a.view(np.int32)[1:9].astype(np.int64)
    for unsigned, signed in ((u, x), (nibble, y), (u, z), (nibble, x)):
        product = unsigned.astype(np.int64) * signed.view(np.int8)
        total = total + product.reshape(8, 4).sum(1)
    np.testing.assert_array_equal(out[40:48], total.astype(np.int32).astype(np.float32))
    sums = a.view(np.int32)[1:9] + a[9:17].view(np.int8).astype(np.int32)
    np.testing.assert_array_equal(out[48:56], sums.astype(np.float32))


@numba.njit
def _floats(halves, values, codes, out):  # type: ignore[no-untyped-def]
    for i in range(0, halves.shape[0], 16):
        words = simd.load_words(halves, i)
        simd.store_floats(out, i, simd.low_halves(words))
        simd.store_floats(out, i + 8, simd.high_halves(words))
    a, b = simd.load_floats(values, 0), simd.load_floats(halves[:16].view(np.uint16), 4)
    c = simd.look_up_floats(values, 3, codes, 2)
    total = simd.subtract_floats(simd.fma(a, b, c), simd.multiply_floats(a, simd.splat_floats(2.0)))
    return simd.sum_floats(simd.add_floats(total, simd.zero_floats())), simd.scalar(halves.view(np.uint16), 7)


def test_operations_on_floats() -> None:
    halves = np.arange(1 << 16, dtype=np.uint16)
    values = np.random.default_rng(1).standard_normal(300).astype(np.float32)
    codes = np.random.default_rng(2).integers(0, 256, 10, dtype=np.uint8)
    out = np.zeros(1 << 16, np.float32)
    total, one = _floats(halves, values, codes, out)
    expected = halves.view(np.float16).astype(np.float32)
    quiet = np.isnan(expected)
    np.testing.assert_array_equal(out.view(np.uint32)[~quiet], expected.view(np.uint32)[~quiet])
    assert np.isnan(out[quiet]).all()
    assert one == expected[7]
    a, b, c = (
        v.astype(np.float64) for v in (values[:8], expected[4:12], values[3:][codes[2:].astype(np.intp)])
    )
    assert total == pytest.approx(float((a * b + c - 2 * a).sum()), rel=1e-5)


@numba.njit
def _spread(values, halves, out, codes, rounded):  # type: ignore[no-untyped-def]
    simd.store_floats(out, 0, simd.spread_two(values, 3))
    simd.store_floats(out, 8, simd.spread_two(halves, 3))
    simd.store_floats(out, 16, simd.spread_four(values, 1))
    simd.store_floats(out, 24, simd.spread_four(halves, 1))
    simd.store_floats(out, 32, simd.look_up_in_eight(values, 5, codes, 2))
    for i in range(0, rounded.shape[0], 8):
        simd.store_halves(rounded, i, simd.load_floats(values, i))


def test_numbers_side_by_side_and_float16() -> None:
    rng = np.random.default_rng(3)
    edges = [
        0,
        -0.0,
        1,
        65504,
        65519,
        65520,
        -65520,
        1e9,
        np.inf,
        -np.inf,
        2**-14,
        2**-24,
        2**-25,
        1e-30,
        6.1e-5,
        -3e-7,
    ]
    ties = (np.arange(-4096, 4096) * 2048 + 0x3F800000).astype(np.uint32)  # halves of the last place
    values = np.concatenate([edges, rng.standard_normal(2048) * 2.0 ** rng.integers(-26, 17, 2048)])
    values = np.concatenate([values.astype(np.float32), ties.view(np.float32)])
    halves = rng.standard_normal(16).astype(np.float16)
    codes = rng.integers(0, 256, 10, dtype=np.uint8)
    out, rounded = np.zeros(40, np.float32), np.zeros(values.size, np.uint16)
    _spread(values, halves.view(np.uint16), out, codes, rounded)
    np.testing.assert_array_equal(out[:8], np.repeat(values[3:5], 4))
    np.testing.assert_array_equal(out[8:16], np.repeat(halves[3:5], 4))
    np.testing.assert_array_equal(out[16:24], np.repeat(values[1:5], 2))
    np.testing.assert_array_equal(out[24:32], np.repeat(halves[1:5], 2))
    np.testing.assert_array_equal(out[32:], values[5 + 256 * np.arange(8) + codes[2:]])
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(rounded, values.astype(np.float16).view(np.uint16))


def test_operations_refuse_other_types() -> None:
    @numba.njit
    def wrong(a):  # type: ignore[no-untyped-def]
        return simd.sum_floats(simd.load_ints(a, 0))

    with pytest.raises(numba.core.errors.TypingError):
        wrong(np.zeros(8, np.int32))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cpu", "features"),
    [("x86-64", ""), ("haswell", "+avx2,+fma,+f16c,+avx,+sse4.2,+sse4.1,+ssse3,+bmi,+bmi2")],
    ids=["without AVX2", "AVX2 alone"],
)
def test_other_cpus_run_the_same_tests(tmp_path: Path, cpu: str, features: str) -> None:
    # target intrinsics on a CPU without them would abort the process, so this runs in another one
    here = Path(__file__).parent
    files = [str(here / name) for name in ("test_simd.py", "test_prepared.py", "test_gemm.py")]
    files.append(str(here.parent / "runtime" / "test_step.py"))
    environment = {
        **os.environ,
        "NUMBA_CPU_NAME": cpu,
        "NUMBA_CPU_FEATURES": features,
        "NUMBA_CACHE_DIR": str(tmp_path),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=here.parents[1])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
