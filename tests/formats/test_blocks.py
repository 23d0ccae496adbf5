"""The table of GGUF block types: golden bytes, random bytes against PyPI ``gguf`` and ggml, refusals."""

from __future__ import annotations

import ctypes
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trapetum.blocktypes import BLOCK_TYPES, BLOCK_TYPES_BY_ID, plain_type
from trapetum.blocktypes.simple import IQ4_VALUES
from trapetum.tensors import LAYOUTS, BlockTensor

OURS = [t.name for t in BLOCK_TYPES.values() if t.pack is not None and t.dtype is None]


def sequence(count: int, low: int, high: int, slope: int) -> np.ndarray:
    """A fixed, irregular run of integers in low..high."""
    j = np.arange(count)
    return low + (3 * j * j + slope * j + 5) // 2 % (high - low + 1)


def trits(count: int) -> np.ndarray:
    j = np.arange(count)
    return ((j * j + 3 * j + 7) // 5 % 3).astype(np.uint8)


# All from the same trits and d = 1.5. Q2_0, TQ1_0 and TQ2_0 were made by ggml's own quantizers, PTQ1_0 is the
# Prism fork's vector.
TERNARY_GOLDEN = {
    "Q2_0": "003e89018955624062951890582506245689",
    "PQ2_0": "003e 8901895562406295189058250624568901895562406295189058250624568901",
    "PTQ1_0": "96c143c85706103296c247d581828796 20212fa2b451d260 5fe4 003e",
    "TQ2_0": "110a448211a04468515a9416a54529110a448211a04468515a9416a54529110a"
    "515a9416a54529110a448211a04468515a9416a54529110a448211a04468515a 003e",
    "TQ1_0": "60e620b4601b215165f12fd28c75a260e620b4601b215165f12fd28c75a260e6"
    "47d581828796c143c857061032 96c247 7fc104c1 003e",
}  # fmt: skip

# type -> (largest code, scales: (count, low, high) or None); see golden_parts.
RANGES = {
    "Q8_0": (255, None), "Q4_0": (15, None), "Q4_1": (15, None), "Q5_0": (31, None), "Q5_1": (31, None),
    "IQ4_NL": (15, None), "MXFP4": (15, None), "NVFP4": (15, (4, 0, 127)),
    "Q2_K": (3, (16, 0, 15)), "Q3_K": (7, (16, -32, 31)), "Q4_K": (15, (8, 0, 63)), "Q5_K": (31, (8, 0, 63)),
    "Q6_K": (63, (16, -128, 127)), "IQ4_XS": (15, (8, -32, 31)),
}  # fmt: skip

GOLDEN = {
    "Q8_0": (
        "003e838a94a1b1c4daf30f2e50759ec9f7285c94ce0b4b8fd51e6aba0c61ba1573d5"
    ),
    "Q4_0": (
        "003ea2f77f2a08195dc46e3b3b6ec45d1908"
    ),
    "Q4_1": (
        "003e80c0a2f77f2a08195dc46e3b3b6ec45d1908"
    ),
    "Q5_0": (
        "003e284f01f5a2f77f2a08195dc46e3b3b6ec45d1908"
    ),
    "Q5_1": (
        "003e80c0284f01f5a2f77f2a08195dc46e3b3b6ec45d1908"
    ),
    "IQ4_NL": (
        "003ea2f77f2a08195dc46e3b3b6ec45d1908"
    ),
    "MXFP4": (
        "7ea2f77f2a08195dc46e3b3b6ec45d1908"
    ),
    "NVFP4": (
        "02060d17e2b7bfea48d99d846a3f3762c051150ce2b7bfea48d99d846a3f3762c051150c"
    ),
    "Q2_K": (
        "22861dd7c4e437bd6642519308a07b79aaffffaa00555500aaffffaa00555500aaffffaa00555500aaffffaa00555500"
        "aaffffaa00555500aaffffaa00555500aaffffaa00555500aaffffaa00555500003e003a"
    ),
    "Q3_K": (
        "00ffff000000ffffff0000ffffff000000ffff000000ffffff0000ffffff0000aaffffaa00555500aaffffaa00555500"
        "aaffffaa00555500aaffffaa00555500aaffffaa00555500aaffffaa00555500aaffffaa00555500aaffffaa00555500"
        "62261d378404b79df89c30d5003e"
    ),
    "Q4_K": (
        "003e003a82c60d5782c8519dc4e437bd2277ffaa8899dd44eebbbbee44dd9988aaff7722001155cc66333366cc551100"
        "2277ffaa8899dd44eebbbbee44dd9988aaff7722001155cc66333366cc5511002277ffaa8899dd44eebbbbee44dd9988"
        "aaff7722001155cc66333366cc5511002277ffaa8899dd44eebbbbee44dd9988aaff7722001155cc66333366cc551100"
    ),
    "Q5_K": (
        "003e003a82c60d5782c8519dc4e437bdaaaaaa55aa55aaaa55555555aaaa55aa55aaaaaaaaaaaaaa55aa55aa55555555"
        "2277ffaa8899dd44eebbbbee44dd9988aaff7722001155cc66333366cc5511002277ffaa8899dd44eebbbbee44dd9988"
        "aaff7722001155cc66333366cc5511002277ffaa8899dd44eebbbbee44dd9988aaff7722001155cc66333366cc551100"
        "2277ffaa8899dd44eebbbbee44dd9988aaff7722001155cc66333366cc551100"
    ),
    "Q6_K": (
        "2277ffaa8899dd44eebbbbee44dd9988aaff7722001155cc66333366cc5511002277ffaa8899dd44eebbbbee44dd9988"
        "aaff7722001155cc66333366cc5511002277ffaa8899dd44eebbbbee44dd9988aaff7722001155cc66333366cc551100"
        "2277ffaa8899dd44eebbbbee44dd9988aaff7722001155cc66333366cc5511006ce46c39c6936c4e1b391b396c4eb1e4"
        "1b4ec64ec64ec64e1be4b14e1b391b396ce46c39c6936c4e1b391b396c4eb1e41b4ec64ec64ec64e1be4b14e1b391b39"
        "82868d97a4b4c7ddf612315378a0cbf9003e"
    ),
    "IQ4_XS": (
        "003e404e627d44d7a2f77f2a08195dc46e3b3b6ec45d1908a2f77f2a08195dc46e3b3b6ec45d1908a2f77f2a08195dc4"
        "6e3b3b6ec45d1908a2f77f2a08195dc46e3b3b6ec45d1908a2f77f2a08195dc46e3b3b6ec45d1908a2f77f2a08195dc4"
        "6e3b3b6ec45d1908a2f77f2a08195dc46e3b3b6ec45d1908a2f77f2a08195dc46e3b3b6ec45d1908"
    ),
}  # fmt: skip


def golden_parts(name: str) -> dict[str, np.ndarray]:
    """The scales and codes that the golden block of a type holds."""
    top, scales = RANGES[name]
    size = BLOCK_TYPES[name].block_size
    signed = name == "Q8_0"
    codes = (
        sequence(size, -127, 127, 11).astype(np.int8)
        if signed
        else sequence(size, 0, top, 7).astype(np.uint8)
    )
    parts: dict[str, np.ndarray] = {"codes": codes[None]}
    if name == "MXFP4":
        parts["e"] = np.array([126], np.uint8)
    elif name != "NVFP4":
        parts["d"] = np.array([1.5], np.float16)
    if name in ("Q4_1", "Q5_1"):
        parts["m"] = np.array([-2.25], np.float16)
    if name in ("Q2_K", "Q4_K", "Q5_K"):
        parts["dmin"] = np.array([0.75], np.float16)
    if scales is not None:
        count, low, high = scales
        parts["scales"] = sequence(count, low, high, 5).astype(np.int8 if low < 0 else np.uint8)[None]
        if "dmin" in parts:
            parts["mins"] = sequence(count, low, high, 9).astype(np.uint8)[None]
    return parts


def golden_values(name: str, parts: dict[str, np.ndarray]) -> np.ndarray:
    """The weights of golden parts in float64, from the formulas of the format alone."""
    size = BLOCK_TYPES[name].block_size
    codes = parts["codes"][0].astype(float)
    d = float(parts.get("d", np.array([0]))[0])
    lut = {"Q8_0": 0, "Q4_0": 8, "Q5_0": 16, "Q4_1": 0, "Q5_1": 0, "Q3_K": 4, "Q6_K": 32}
    table = IQ4_VALUES.astype(float)
    fp4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    if name == "MXFP4":
        return fp4[parts["codes"][0]] * 2.0 ** (126 - 127)
    if name == "NVFP4":
        e, m = parts["scales"][0] >> 3, parts["scales"][0] & 7
        scale = np.where(e == 0, m / 8 * 2.0**-6, (1 + m / 8) * 2.0 ** (e.astype(float) - 7))
        return fp4[parts["codes"][0]] * np.repeat(scale, 16)
    scale = (
        d * np.repeat(parts["scales"][0].astype(float), size // parts["scales"].shape[1])
        if "scales" in parts
        else d
    )
    if name in ("IQ4_NL", "IQ4_XS"):
        return scale * table[parts["codes"][0]]
    offset = 0.0
    if "m" in parts:
        offset = float(parts["m"][0])
    if "mins" in parts:
        offset = -0.75 * np.repeat(parts["mins"][0].astype(float), size // parts["mins"].shape[1])
    return scale * (codes - lut.get(name, 0)) + offset


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_block(name: str) -> None:
    block = np.frombuffer(bytes.fromhex(GOLDEN[name]), np.uint8)[None]
    parts = golden_parts(name)
    entry = BLOCK_TYPES[name]
    np.testing.assert_array_equal(entry.from_parts(parts), block)
    for key, value in entry.to_parts(block).items():
        np.testing.assert_array_equal(value, parts[key], err_msg=key)
    np.testing.assert_array_equal(entry.decode(block)[0], golden_values(name, parts))


@pytest.mark.parametrize("name", TERNARY_GOLDEN)
def test_golden_ternary_block(name: str) -> None:
    block = np.frombuffer(bytes.fromhex(TERNARY_GOLDEN[name]), np.uint8)[None]
    entry = BLOCK_TYPES[name]
    codes = trits(entry.block_size)
    np.testing.assert_array_equal(
        entry.from_parts({"d": np.array([1.5], np.float16), "codes": codes[None]}), block
    )
    np.testing.assert_array_equal(entry.decode(block)[0], 1.5 * (codes.astype(float) - 1))


def test_golden_sign_block() -> None:
    block = np.frombuffer(bytes.fromhex("503b1bfb8dfdc67e63bfb1dfd86fec37f61b"), np.uint8)[None]
    entry = BLOCK_TYPES["Q1_0"]
    bits = (trits(128) > 0).astype(np.uint8)  # ggml maps zero to the positive value
    np.testing.assert_array_equal(
        entry.from_parts({"d": np.array([0.9140625], np.float16), "codes": bits[None]}), block
    )
    np.testing.assert_array_equal(entry.decode(block)[0], np.where(bits, 0.9140625, -0.9140625))


def test_zero_blocks_of_the_ternary_types() -> None:
    expected = {"PQ2_0": "0000" + 32 * "55", "PTQ1_0": 24 * "80" + "7f7f0000", "TQ2_0": 64 * "55" + "0000"}
    for name, text in expected.items():
        entry = BLOCK_TYPES[name]
        parts = {"d": np.zeros(1, np.float16), "codes": np.ones((1, entry.block_size), np.uint8)}
        assert entry.from_parts(parts).tobytes().hex() == text, name


def random_blocks(name: str, count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, BLOCK_TYPES[name].type_size), dtype=np.uint8)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    nan = np.isnan(a) & np.isnan(b)  # the payload of a NaN is not defined by IEEE arithmetic
    return bool(np.all(nan | (a.view(np.uint32) == b.view(np.uint32))))


@pytest.mark.parametrize("name", [t.name for t in BLOCK_TYPES.values() if t.values is not None])
def test_random_bytes_decode_as_pypi_gguf(name: str) -> None:
    gguf = pytest.importorskip("gguf")
    if BLOCK_TYPES[name].id not in gguf.GGMLQuantizationType._value2member_map_:
        pytest.skip("gguf does not know this type")
    blocks = random_blocks(name, 1000)
    try:
        with np.errstate(all="ignore"):
            expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(BLOCK_TYPES[name].id))
    except NotImplementedError:
        pytest.skip("gguf does not decode this type")
    assert same_bits(BLOCK_TYPES[name].decode(blocks), np.asarray(expected, np.float32))


def ggml() -> ctypes.CDLL:
    """ggml inside the xllamacpp wheel, found without importing it."""
    spec = find_spec("xllamacpp")
    libraries = sorted(Path(spec.origin).parent.glob("*.so")) if spec and spec.origin else []
    if not libraries:
        pytest.skip("xllamacpp is not installed")
    return ctypes.CDLL(str(libraries[0]))


@pytest.mark.parametrize(
    "name", ["Q1_0", "Q2_0", "TQ1_0", "TQ2_0", "Q4_K", "Q6_K", "IQ4_XS", "NVFP4", "MXFP4"]
)
def test_random_bytes_decode_as_ggml(name: str) -> None:
    suffix = name if name.startswith(("Q4_K", "Q6_K")) else name.lower()
    decode = getattr(ggml(), f"dequantize_row_{suffix}" if suffix != name else f"dequantize_row_q{name[1:]}")
    decode.argtypes, decode.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64), None
    blocks = random_blocks(name, 500, seed=1)
    out = np.empty((500, BLOCK_TYPES[name].block_size), np.float32)
    decode(blocks.ctypes.data, out.ctypes.data, out.size)
    assert same_bits(BLOCK_TYPES[name].decode(blocks), out)


def test_every_byte_of_base_three_decodes_to_its_trits() -> None:
    # The definition: 5 trits, most significant first, as ceil(v * 256 / 243).
    raw = np.zeros((243, 54), np.uint8)
    values = np.arange(243)
    raw[:, 0] = -(-values * 256 // 243)
    codes = BLOCK_TYPES["TQ1_0"].to_parts(raw)["codes"]
    for n in range(5):
        np.testing.assert_array_equal(codes[:, 32 * n], values // 3 ** (4 - n) % 3)


@pytest.mark.parametrize("name", OURS)
def test_pack_undoes_unpack(name: str) -> None:
    entry = BLOCK_TYPES[name]
    blocks = random_blocks(name, 300, seed=2)
    if name in (
        "TQ1_0",
        "PTQ1_0",
    ):  # 13 of 256 bytes are not canonical: bring them to the form that a writer makes
        blocks = entry.from_parts(entry.to_parts(blocks))
    np.testing.assert_array_equal(entry.from_parts(entry.to_parts(blocks)), blocks)


def test_a_pq2_block_is_two_q2_blocks_with_one_scale() -> None:
    blocks = random_blocks("PQ2_0", 50, seed=3)
    halves = np.concatenate([blocks[:, :2], blocks[:, 2:18], blocks[:, :2], blocks[:, 18:]], axis=1)
    assert same_bits(BLOCK_TYPES["PQ2_0"].decode(blocks), BLOCK_TYPES["Q2_0"].decode(halves))


def test_sizes_and_ids() -> None:
    sizes = {t.name: (t.id, t.block_size, t.type_size) for t in BLOCK_TYPES.values()}
    assert sizes["PQ2_0"] == (142, 128, 34)
    assert sizes["PTQ1_0"] == (143, 128, 28)
    assert sizes["Q2_0"] == (42, 64, 18)
    assert sizes["Q4_K"] == (12, 256, 144)
    assert len(BLOCK_TYPES_BY_ID) == len(BLOCK_TYPES)
    gguf = pytest.importorskip("gguf")
    for kind, (block, size) in gguf.GGML_QUANT_SIZES.items():
        if kind.name != "Q8_1":  # gguf lists its old form; it is never stored
            assert sizes[kind.name] == (int(kind), block, size)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("Q4_0", {"d": np.ones(1, np.float16), "codes": np.full((1, 32), 16, np.uint8)}),
        ("Q5_0", {"d": np.ones(1, np.float16), "codes": np.full((1, 32), 32, np.uint8)}),
        ("PQ2_0", {"d": np.ones(1, np.float16), "codes": np.full((1, 128), 4, np.uint8)}),
        ("PTQ1_0", {"d": np.ones(1, np.float16), "codes": np.full((1, 128), 3, np.uint8)}),
        ("Q6_K", {**golden_parts("Q6_K"), "codes": np.full((1, 256), 64, np.uint8)}),
        ("Q3_K", {**golden_parts("Q3_K"), "scales": np.full((1, 16), 32, np.int8)}),
        ("Q4_K", {**golden_parts("Q4_K"), "mins": np.full((1, 8), 64, np.uint8)}),
    ],
)  # fmt: skip
def test_values_that_do_not_fit_are_refused(name: str, parts: dict[str, np.ndarray]) -> None:
    with pytest.raises(ValueError, match=r"does not fit|outside|no trit"):
        BLOCK_TYPES[name].from_parts(parts)


def test_rows_must_be_whole_blocks() -> None:
    with pytest.raises(ValueError, match="320 weights is not a multiple of TQ2_0's block of 256"):
        BLOCK_TYPES["TQ2_0"].row_bytes(320)
    with pytest.raises(ValueError, match="19 bytes are not a whole number"):
        BLOCK_TYPES["Q4_0"].decode(np.zeros((2, 19), np.uint8))


def test_plain_types() -> None:
    assert plain_type(np.dtype("float32")).id == 0
    with pytest.raises(ValueError, match="GGUF has no type for uint8"):
        plain_type(np.dtype("uint8"))


@given(st.sampled_from(OURS), st.integers(1, 4), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_block_tensor(name: str, rows: int, width: int, seed: int) -> None:
    entry = BLOCK_TYPES[name]
    blocks = np.random.default_rng(seed).integers(0, 256, (rows, width * entry.type_size), dtype=np.uint8)
    tensor = BlockTensor(name, blocks)
    assert tensor.shape == (rows, width * entry.block_size)
    assert tensor.nbits_per_weight == entry.bits_per_weight
    again = LAYOUTS["blocks"].from_arrays(tensor.to_arrays(), tensor.shape, tensor.params())
    assert same_bits(again.dequantize()[1:], tensor.dequantize(slice(1, None)))


def test_block_tensor_refuses_what_does_not_belong_together() -> None:
    blocks = np.zeros((4, 144), np.uint8)
    assert BlockTensor("Q4_K", blocks, (2, 2, 256)).dequantize().shape == (2, 2, 256)
    with pytest.raises(ValueError, match="is not 4 rows of 256"):
        BlockTensor("Q4_K", blocks, (4, 512))
    with pytest.raises(ValueError, match="unknown"):
        BlockTensor("Q4_X", blocks)
