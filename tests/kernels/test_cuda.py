"""CUDA kernels against float64 and NumPy's decode: fresh random data, poisoned outputs, the same bits every time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from trapetum.formats import planes, tiles
from trapetum.rotation import HadamardRotation
from trapetum.tensors import AdditiveTensor, CodebookTensor, QuantizedTensor, TernaryTensor

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

Rng = np.random.Generator


@pytest.fixture(scope="module", autouse=True)
def _card() -> None:
    from trapetum.errors import KernelUnavailable
    from trapetum.kernels.cuda.module import card

    try:
        card()
    except KernelUnavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture
def rng() -> Rng:
    """Other numbers in every run: a failure prints the seed."""
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def codebook(rng: Rng, rows: int, count: int, size: int) -> CodebookTensor:
    codes = rng.integers(0, size, (rows, count), dtype=np.uint8)
    return CodebookTensor(codes, rng.standard_normal((rows, size)).astype(np.float16))


def additive(rng: Rng, rows: int, count: int, books: int) -> AdditiveTensor:
    codes = rng.integers(0, 256, (books, count // 8, rows), dtype=np.uint8)
    vectors = rng.standard_normal((books, 256, 8)).astype(np.float16)
    return AdditiveTensor(codes, vectors, rng.uniform(0.5, 2, rows).astype(np.float16))


def ternary(rng: Rng, rows: int, count: int) -> TernaryTensor:
    scales = rng.standard_normal((rows, count // 128)).astype(np.float16)
    scales.reshape(-1)[::7] = 0
    return TernaryTensor(rng.integers(0, 4, (rows, count), dtype=np.uint8), scales, 4)


def upload(tensor: QuantizedTensor) -> Any:
    from trapetum.kernels.cuda.linear import cuda_linear

    if isinstance(tensor, TernaryTensor):
        return cuda_linear(planes.LAYOUT, planes.tensor_planes([tensor]), tensor.rows, tensor.in_features)
    made = tiles.tiles_for(tensor)
    assert made is not None
    form = made.of([tensor])
    return cuda_linear(form.layout, form.pack([tensor]), tensor.rows, tensor.in_features, form.entries)


def to_bfloat(x: np.ndarray) -> np.ndarray:
    import ml_dtypes

    return x.astype(ml_dtypes.bfloat16)


def quantized(x: np.ndarray) -> np.ndarray:
    """The rule of the integer kernels, written down once more: float32 scale, one division, ties to even."""
    groups = x.astype(np.float32).reshape(len(x), -1, 128)
    scale = np.abs(groups).max(-1, keepdims=True) / np.float32(127)
    with np.errstate(invalid="ignore", divide="ignore"):
        codes = np.where(scale > 0, np.clip(np.rint(groups / scale), -127, 127), 0)
    return (codes.astype(np.float64) * scale.astype(np.float64)).reshape(x.shape)


def weights(tensor: QuantizedTensor, bfloat: bool) -> np.ndarray:
    """What the kernel multiplies by, float64: tables are rounded to bfloat16 beside bfloat16 activations."""
    if bfloat and isinstance(tensor, CodebookTensor):
        return to_bfloat(tensor.dequantize()).astype(np.float64)
    if bfloat and isinstance(tensor, AdditiveTensor):
        rounded = to_bfloat(tensor.codebooks.astype(np.float32)).astype(np.float64)
        total = sum(book[chosen.T] for book, chosen in zip(rounded, tensor.codes, strict=True))
        return (total * tensor.scales.astype(np.float64)[:, None, None]).reshape(tensor.rows, -1)
    return tensor.dequantize().astype(np.float64)


CASES: list[tuple[Callable[..., QuantizedTensor], tuple[int, ...]]] = [
    (codebook, (1, 16, 16)),
    (codebook, (130, 37, 5)),
    (codebook, (1000, 2048, 16)),
    (codebook, (65, 5, 200)),
    (codebook, (130, 1000, 17)),
    (codebook, (1000, 2048, 256)),
    (additive, (33, 40, 1)),
    (additive, (130, 1000, 2)),
    (additive, (1000, 2048, 2)),
    (additive, (50, 264, 3)),
    (additive, (50, 264, 4)),
    (ternary, (1, 128)),
    (ternary, (130, 384)),
    (ternary, (1000, 2048)),
    (ternary, (40, 8960)),  # too many inputs for blocks to quantize them themselves
]
NAMES = [f"{make.__name__}-{'x'.join(map(str, sizes))}" for make, sizes in CASES]


@pytest.mark.parametrize("bfloat", [False, True], ids=["float16", "bfloat16"])
@pytest.mark.parametrize(("make", "sizes"), CASES, ids=NAMES)
def test_products(
    make: Callable[..., QuantizedTensor], sizes: tuple[int, ...], bfloat: bool, rng: Rng
) -> None:
    tensor = make(rng, *sizes)
    linear = upload(tensor)
    matrix = weights(tensor, bfloat)
    for tokens in (*range(1, 17), 17, 47, 48, 150):
        x = rng.standard_normal((tokens, tensor.in_features))
        x[tokens // 2, :128] = 0
        stored = to_bfloat(x) if bfloat else x.astype(np.float16)
        exact = quantized(stored) if isinstance(tensor, TernaryTensor) else stored.astype(np.float64)
        expected = exact @ matrix.T
        out = cupy.full((tokens, tensor.rows), cupy.nan, cupy.float32)
        linear.multiply(cupy.asarray(stored.view(np.uint16) if bfloat else stored), out)
        error = np.linalg.norm(cupy.asnumpy(out) - expected) / max(np.linalg.norm(expected), 1e-30)
        # From 48 tokens on additive sums are rounded to 16 bits a weight before they are multiplied.
        rounded = isinstance(tensor, AdditiveTensor) and tokens >= linear.dense_tokens
        assert error < (4e-3 if rounded else 4e-6), tokens


@pytest.mark.parametrize(("make", "sizes"), CASES, ids=NAMES)
def test_output_formats(make: Callable[..., QuantizedTensor], sizes: tuple[int, ...], rng: Rng) -> None:
    tensor = make(rng, *sizes)
    linear = upload(tensor)
    x = cupy.asarray(rng.standard_normal((3, tensor.in_features)).astype(np.float16))
    wide = linear.multiply(x, cupy.empty((3, tensor.rows), cupy.float32))
    narrow = linear.multiply(x)
    assert narrow.dtype == cupy.float16
    np.testing.assert_array_equal(cupy.asnumpy(narrow), cupy.asnumpy(wide).astype(np.float16))
    with pytest.raises(ValueError, match="are allowed"):
        linear.multiply(x, cupy.empty((3, tensor.rows), cupy.uint16))
    with pytest.raises(ValueError, match="is needed"):
        linear.multiply(x[:, ::-1])


@pytest.mark.parametrize(("make", "sizes"), CASES, ids=NAMES)
def test_the_same_bits_a_hundred_times(
    make: Callable[..., QuantizedTensor], sizes: tuple[int, ...], rng: Rng
) -> None:
    tensor = make(rng, *sizes)
    linear = upload(tensor)
    for tokens in (1, 3, 8, 16, 64):
        x = cupy.asarray(rng.standard_normal((tokens, tensor.in_features)).astype(np.float16))
        first = linear.multiply(x, cupy.empty((tokens, tensor.rows), cupy.float32))
        for _ in range(100):
            out = cupy.full((tokens, tensor.rows), cupy.nan, cupy.float32)
            linear.multiply(x, out)
            assert bool((out.view(cupy.uint32) == first.view(cupy.uint32)).all()), tokens


@pytest.mark.parametrize(("make", "sizes"), CASES, ids=NAMES)
def test_rows_decode_exactly(make: Callable[..., QuantizedTensor], sizes: tuple[int, ...], rng: Rng) -> None:
    tensor = make(rng, *sizes)
    linear = upload(tensor)
    expected = tensor.dequantize()
    ids = np.array([tensor.rows - 1, 0, tensor.rows // 2], np.int32)
    out = cupy.full((3, tensor.in_features), cupy.nan, cupy.float32)
    np.testing.assert_array_equal(cupy.asnumpy(linear.take(cupy.asarray(ids), out)), expected[ids])
    everything = cupy.full(expected.shape, cupy.nan, cupy.float32)
    np.testing.assert_array_equal(cupy.asnumpy(linear.take(None, everything)), expected)
    outside = linear.take(cupy.asarray(np.array([-1, tensor.rows], np.int32)), out[:2])
    assert bool(cupy.isnan(outside).all())


def test_every_code_byte(rng: Rng) -> None:
    """All 256 bytes in all places of a lane's sixteen, against tables whose entries tell where they come from."""
    pairs = np.arange(256)
    codes = np.stack([pairs & 15, pairs >> 4], 1).reshape(-1).astype(np.uint8)
    four = CodebookTensor(
        np.stack([np.roll(codes, 2 * r) for r in range(64)]),
        np.arange(1024.0, dtype=np.float16).reshape(64, 16),
    )
    eight = CodebookTensor(
        np.stack([np.roll(pairs, r) for r in range(128)]).astype(np.uint8),
        rng.permutation(np.arange(256.0)).astype(np.float16) + np.arange(128, dtype=np.float16)[:, None],
    )
    for tensor in (four, eight):
        linear = upload(tensor)
        for start in range(0, tensor.in_features, 16):  # one input at a time: y is a column of W
            x = np.zeros((16, tensor.in_features), np.float16)
            x[np.arange(16), start + np.arange(16)] = 1
            out = linear.multiply(cupy.asarray(x), cupy.empty((16, tensor.rows), cupy.float32))
            expected = tensor.dequantize()[:, start : start + 16].T
            np.testing.assert_array_equal(cupy.asnumpy(out), expected)


def test_quantized_activations_are_the_rule(rng: Rng) -> None:
    tensor = ternary(rng, 16, 512)
    linear = upload(tensor)
    x = rng.standard_normal((5, 512)).astype(np.float16)
    x[0] = np.tile(np.arange(-64, 64) / 2, 4)  # ties
    x[1, :128] = 0
    x[2] *= np.float16(6e-8)  # subnormal
    codes, groups = cupy.empty((5, 512), cupy.int8), cupy.empty((4, 8), cupy.uint64)
    linear.quantize(cupy.asarray(x), codes, groups, 8)
    # Byte 8 s + 4 w + b of 32 is input 16 w + 4 b + s.
    found = cupy.asnumpy(codes).reshape(5, 16, 4, 2, 4).transpose(0, 1, 3, 4, 2).reshape(5, 512)
    wide = x.astype(np.float32).reshape(5, 4, 128)
    scale = np.abs(wide).max(-1) / np.float32(127)
    with np.errstate(invalid="ignore", divide="ignore"):
        expected = np.where(scale[..., None] > 0, np.rint(wide / scale[..., None]), 0).astype(np.int8)
    np.testing.assert_array_equal(found, expected.reshape(5, 512))
    words = cupy.asnumpy(groups).view(np.uint32).reshape(4, 8, 2)
    np.testing.assert_array_equal(words[:, :5, 0].view(np.float32), scale.T)
    np.testing.assert_array_equal(words[:, :5, 1].view(np.int32), expected.astype(np.int32).sum(-1).T)
    assert not words[:, 5:].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("tokens", [1, 3, 8, 16, 64])
def test_what_is_not_finite_spoils_its_token_only(bad: float, tokens: int, rng: Rng) -> None:
    tensor = ternary(rng, 40, 1024)
    linear = upload(tensor)
    x = rng.standard_normal((tokens, 1024)).astype(np.float16)
    x[tokens // 2, 777] = bad
    found = cupy.asnumpy(linear.multiply(cupy.asarray(x), cupy.empty((tokens, 40), cupy.float32)))
    others = np.arange(tokens) != tokens // 2
    assert not np.isfinite(found[tokens // 2]).any()
    assert np.isfinite(found[others]).all()


@pytest.mark.parametrize("block", [2, 64, 128, 1024, 4096])
def test_rotation(block: int, rng: Rng) -> None:
    from trapetum.kernels.cuda.rotate import rotate

    signs = rng.choice([-1, 1], 8192).astype(np.int8)
    rotation = HadamardRotation(block, {8192: signs})
    x = rng.standard_normal((3, 8192)).astype(np.float32)
    found = rotate(cupy.asarray(x), cupy.asarray(signs), block, cupy.empty(x.shape, cupy.float32))
    np.testing.assert_allclose(cupy.asnumpy(found), rotation.fold(x), rtol=0, atol=3e-6)
    back = rotate(found, cupy.asarray(signs), block, after=True)
    np.testing.assert_allclose(cupy.asnumpy(back), x, rtol=0, atol=5e-6)


def test_no_compilation_for_new_numbers_of_tokens(rng: Rng) -> None:
    from trapetum.kernels.cuda.module import counters

    linear = upload(ternary(rng, 64, 256)), upload(codebook(rng, 64, 256, 16))
    for one in linear:
        for tokens in (1, 64):
            one.multiply(cupy.zeros((tokens, 256), cupy.float16))
    before = dict(counters)
    for one in linear:
        for tokens in range(1, 80):
            one.multiply(cupy.zeros((tokens, 256), cupy.float16))
    assert counters == before


def test_one_graph_with_new_inputs(rng: Rng) -> None:
    """A captured product reads its input anew at every launch, and leaves counters as it found them."""
    tensor = codebook(rng, 1000, 2048, 16)
    linear = upload(tensor)
    x, out = cupy.zeros((1, 2048), cupy.float16), cupy.empty((1, 1000), cupy.float32)
    linear.multiply(x, out)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        linear.multiply(x, out)
        linear.multiply(x, out)
        graph = stream.end_capture()
        for _ in range(3):
            fresh = rng.standard_normal((1, 2048)).astype(np.float16)
            x.set(fresh)
            out.fill(cupy.nan)
            graph.launch(stream)
            stream.synchronize()
            expected = fresh.astype(np.float64) @ tensor.dequantize().astype(np.float64).T
            assert np.linalg.norm(cupy.asnumpy(out) - expected) < 4e-6 * np.linalg.norm(expected)
    assert not bool(linear.workspace.arrived.any())
