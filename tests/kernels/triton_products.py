"""Triton kernels against float64, NumPy's decode and exact integers. Run by test_triton.py: in Triton's interpreter on
the CPU (``TRITON_INTERPRET=1`` must be set before triton is imported), and on a card where there is one.
"""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

import trapetum
from trapetum.errors import FormatError, KernelUnavailable, UnsupportedModelError
from trapetum.formats.planes import PlanesFile, PlanesLayout, PlanesPart, TilesEntry, write_planes
from trapetum.formats.planes_entries import PlanesEntry
from trapetum.formats.planes_layout import tensor_planes
from trapetum.formats.tiles import Codebook4Tiles
from trapetum.kernels.triton import pq2
from trapetum.rotation import HadamardRotation
from trapetum.tensors import CodebookTensor, DenseTensor, TernaryTensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REPEATS = 100 if DEVICE == "cuda" else 2
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}

Rng = np.random.Generator


@pytest.fixture
def rng() -> Rng:
    """Other numbers in every run: a failure prints the seed."""
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}")
    return np.random.default_rng(seed)


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is allocated holds NaN or 99: what is not written shows."""
    plain = torch.empty

    def empty(*sizes, **options):
        made = plain(*sizes, **options)
        return made.fill_(float("nan") if made.is_floating_point() else 99)

    monkeypatch.setattr(torch, "empty", empty)


def ternary(rng: Rng, rows: int, count: int, levels: int = 4) -> TernaryTensor:
    scales = rng.standard_normal((rows, count // 128)).astype(np.float16)
    scales.reshape(-1)[6::7] = 0
    return TernaryTensor(rng.integers(0, levels, (rows, count), dtype=np.uint8), scales, levels)


def upload(tensor: TernaryTensor) -> torch.Tensor:
    return torch.from_numpy(tensor_planes([tensor])).to(DEVICE)


def stored(x: np.ndarray, dtype: str) -> tuple[torch.Tensor, np.ndarray]:
    """Activations of a dtype, for torch and as float32."""
    rounded = x.astype({"bfloat16": ml_dtypes.bfloat16}.get(dtype, dtype)).astype(np.float32)
    return torch.from_numpy(rounded).to(DTYPES[dtype]).to(DEVICE), rounded


def rule(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The quantizer written down once more: codes int8 [tokens, inputs] and float32 scales [tokens, groups]."""
    groups = x.astype(np.float32).reshape(len(x), -1, 128)
    scale = np.abs(groups).max(-1, keepdims=True) / np.float32(127)
    with np.errstate(invalid="ignore", divide="ignore"):
        codes = np.where(scale > 0, np.clip(np.rint(groups / scale), -127, 127), 0)
    return codes.reshape(x.shape).astype(np.int8), scale[..., 0]


def expected(x: np.ndarray, tensor: TernaryTensor) -> np.ndarray:
    """Float64 product of the quantized activations."""
    codes, scale = rule(x)
    wide = codes.astype(np.float64) * np.repeat(scale.astype(np.float64), 128, axis=1)
    return wide @ tensor.dequantize().astype(np.float64).T


def distance(found: torch.Tensor, exact: np.ndarray) -> float:
    error = np.linalg.norm(found.double().cpu().numpy() - exact)
    return float(error / max(np.linalg.norm(exact), 1e-30))


@pytest.mark.parametrize(
    ("rows", "count", "tokens", "dtype"),
    [
        (1, 128, (1, 2, 16, 17), "float16"),
        (130, 384, (1, 5, 16, 17), "float16"),
        (130, 384, (1, 16), "bfloat16"),
        (130, 384, (2, 17), "float32"),
        pytest.param(257, 1152, (1, 7), "float16", marks=pytest.mark.slow),
        pytest.param(257, 1152, (16, 17, 128, 129, 300), "bfloat16", marks=pytest.mark.slow),
        pytest.param(40, 4096, (*range(1, 19), 33), "float16", marks=pytest.mark.slow),
    ],
)
def test_products(rows: int, count: int, tokens: tuple[int, ...], dtype: str, rng: Rng) -> None:
    tensor = ternary(rng, rows, count)
    planes = upload(tensor)
    for number in tokens:
        values = rng.standard_normal((number, count))
        values[number // 2, :128] = 0
        x, exact = stored(values, dtype)
        assert distance(pq2.pq2_linear(x, planes, torch.float32), expected(exact, tensor)) < 4e-7, number


@pytest.mark.parametrize("programs", [1, 4, *(pytest.param(n, marks=pytest.mark.slow) for n in (6, 1000))])
@pytest.mark.parametrize("tokens", [2, pytest.param(17, marks=pytest.mark.slow)])
def test_shares_of_the_inputs(programs: int, tokens: int, rng: Rng, monkeypatch: pytest.MonkeyPatch) -> None:
    """One program a tile, several with an incomplete last one, and as many as there are groups."""
    tensor = ternary(rng, 130, 896)
    for tile in ("_FEW", "_MANY"):
        monkeypatch.setattr(pq2, tile, getattr(pq2, tile)._replace(programs=programs))
    x, exact = stored(rng.standard_normal((tokens, 896)), "float16")
    assert distance(pq2.pq2_linear(x, upload(tensor), torch.float32), expected(exact, tensor)) < 4e-7


def test_three_levels(rng: Rng) -> None:
    tensor = ternary(rng, 65, 256, levels=3)
    x, exact = stored(rng.standard_normal((2, 256)), "float16")
    assert distance(pq2.pq2_linear(x, upload(tensor), torch.float32), expected(exact, tensor)) < 4e-7


@pytest.mark.parametrize("tokens", [1, 16, 17])
def test_integers_are_exact(tokens: int, rng: Rng) -> None:
    """With scales of one every sum is an integer below 2**24, and float32 holds all of them."""
    codes = rng.integers(0, 4, (130, 640), dtype=np.uint8)
    tensor = TernaryTensor(codes, np.ones((130, 5), np.float16), 4)
    x = rng.integers(-127, 128, (tokens, 640))
    x[:, ::128] = 127 * rng.choice([-1, 1], (tokens, 5))
    found = pq2.pq2_linear(stored(x, "bfloat16")[0], upload(tensor), torch.float32).cpu().numpy()
    np.testing.assert_array_equal(found, x @ (codes.astype(np.int64) - 1).T)


@pytest.mark.parametrize("tokens", [16, 128])
def test_every_code_byte(tokens: int) -> None:
    """All 256 bytes in each of a group's 32 places; each output is one weight, for one input is not zero."""
    places = np.arange(256)[:, None] + 8 * np.arange(32) & 255
    codes = (places[:, :, None] >> 2 * np.arange(4) & 3).reshape(256, 128).astype(np.uint8)
    scales = np.linspace(-2, 2, 256).astype(np.float16)[:, None]
    tensor = TernaryTensor(codes, scales, 4)
    planes = upload(tensor)
    assert len(set(planes.flatten()[: 256 * 32].tolist())) == 256
    weights = tensor.dequantize()
    for start in range(0, 128, tokens):
        x = np.zeros((tokens, 128), np.float32)
        x[np.arange(tokens), start + np.arange(tokens)] = 127
        found = pq2.pq2_linear(stored(x, "float16")[0], planes, torch.float32)
        np.testing.assert_array_equal(found.cpu().numpy(), 127 * weights[:, start : start + tokens].T)


@pytest.mark.parametrize("dtype", DTYPES)
def test_quantized_activations_are_the_rule(dtype: str, rng: Rng) -> None:
    x = rng.standard_normal((5, 512)).astype(np.float32)
    x[0] = np.tile(np.arange(-64, 64) / 2, 4)  # scale 1/4 of 127/32: ties are met below
    x[1, :128] = 0
    x[2] *= 6e-8  # subnormal float16
    x[3, :256] = np.repeat([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 62.5, -127.0], 32)  # ties at scale 1
    x[4] *= 200  # beyond what float16 holds where squared
    x[4, :128] = np.float32(190 * 2.0**-149)  # a subnormal scale is too coarse: the quotients are 190
    given, exact = stored(x, dtype)
    codes = torch.empty((5, 512), dtype=torch.int8, device=DEVICE)
    scales = torch.empty((4, 16), dtype=torch.float32, device=DEVICE)
    pq2.quantize_activations[(8,)](given, codes, scales, 5, 16, 4, GROUPS=8)
    # Of 16, byte 4 s + b is input 4 b + s.
    found = codes.cpu().numpy().reshape(5, 32, 4, 4).transpose(0, 1, 3, 2).reshape(5, 512)
    ours, scale = rule(exact)
    np.testing.assert_array_equal(found, ours)
    np.testing.assert_array_equal(scales.cpu().numpy()[:, :5], scale.T)
    assert not scales[:, 5:].any()


@pytest.mark.parametrize(("bad", "tokens"), [(np.nan, 2), (-np.inf, 2), (np.inf, 18)])
def test_what_is_not_finite_spoils_its_token_only(bad: float, tokens: int, rng: Rng) -> None:
    tensor = ternary(rng, 20, 256)
    values = rng.standard_normal((tokens, 256))
    clean, exact = stored(values, "float16")
    values[1, 200] = bad
    found = pq2.pq2_linear(stored(values, "float16")[0], upload(tensor), torch.float32)
    assert torch.isnan(found[1]).all()
    others = [0, *range(2, tokens)]
    assert distance(found[others], expected(exact, tensor)[others]) < 4e-7
    assert not torch.isnan(pq2.pq2_linear(clean, upload(tensor))).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_formats_of_the_result(dtype: str, rng: Rng) -> None:
    planes = upload(ternary(rng, 70, 256))
    x, _ = stored(rng.standard_normal((2, 3, 256)), dtype)
    wide = pq2.pq2_linear(x, planes, torch.float32)
    assert wide.shape == (2, 3, 70)
    for out_dtype in (None, *DTYPES.values()):
        found = pq2.pq2_linear(x, planes, out_dtype)
        assert found.dtype == (out_dtype or x.dtype)
        if (
            DEVICE == "cpu" and found.dtype == torch.bfloat16
        ):  # Triton's interpreter cuts off instead of rounding
            assert ((found.float() - wide).abs() <= 2**-7 * wide.abs()).all()
        else:
            assert torch.equal(found, wide.to(found.dtype))
    assert pq2.pq2_linear(x[:, :0], planes).shape == (2, 0, 70)
    assert torch.equal(pq2.pq2_linear(x[0, 0], planes, torch.float32), wide[0, 0])


@pytest.mark.parametrize("tokens", [1, 16, pytest.param(20, marks=pytest.mark.slow)])
def test_the_same_bits_again(tokens: int, rng: Rng) -> None:
    tensor = ternary(rng, 150, 640)
    planes = upload(tensor)
    x, _ = stored(rng.standard_normal((tokens, 640)), "float16")
    first = pq2.pq2_linear(x, planes, torch.float32)
    for _ in range(REPEATS):
        assert torch.equal(pq2.pq2_linear(x, planes, torch.float32), first)
    if tokens <= pq2.MOST_TOKENS:  # a token's result does not depend on its company
        assert torch.equal(pq2.pq2_linear(x[-1:], planes, torch.float32), first[-1:])


def test_addresses_that_are_not_aligned(rng: Rng) -> None:
    tensor = ternary(rng, 33, 256)
    planes = upload(tensor)
    x, _ = stored(rng.standard_normal((4, 256)), "float16")
    shifted = torch.cat([x.new_zeros(1), x.flatten()])[1:].reshape(4, 256)
    elsewhere = torch.cat([planes.new_zeros(1), planes.flatten()])[1:].reshape(planes.shape)
    assert shifted.data_ptr() % 16
    assert elsewhere.data_ptr() % 16
    assert torch.equal(pq2.pq2_linear(shifted, elsewhere), pq2.pq2_linear(x, planes))
    assert torch.equal(pq2.pq2_linear(x.t().contiguous().t(), planes), pq2.pq2_linear(x, planes))


def test_what_does_not_fit_is_refused(rng: Rng) -> None:
    planes = upload(ternary(rng, 8, 256))
    x = torch.zeros(1, 256, dtype=torch.float16, device=DEVICE)
    for bad, message in (
        (x.int(), "are allowed"),
        (x[:, :128], r"\(\.\.\., 256\) is needed"),
        (x[0, 0], "is needed"),
    ):
        with pytest.raises(ValueError, match=message):
            pq2.pq2_linear(bad, planes)
    with pytest.raises(ValueError, match=r"the result torch\.int64; .* are allowed"):
        pq2.pq2_linear(x, planes, torch.int64)
    for bad in (planes.int(), planes[:, :67], planes.flatten(), planes[:0], planes[:, :0]):
        with pytest.raises(ValueError, match=r"uint8 \(rows, in_features / 128 \* 34\)"):
            pq2.pq2_linear(x, bad)
    with pytest.raises(ValueError, match="x requires a gradient"):
        pq2.pq2_linear(x.requires_grad_(), planes)
    with torch.no_grad():
        assert not pq2.pq2_linear(x, planes).any()
    x = x.detach()
    with pytest.raises(ValueError, match="x is on meta"):
        pq2.pq2_linear(x.to("meta"), planes)
    with pytest.raises(KernelUnavailable, match="run on CUDA devices"):
        pq2.pq2_linear(x.to("meta"), planes.to("meta"))


@pytest.mark.parametrize("block", [128, pytest.param(256, marks=pytest.mark.slow)])
def test_rotated_weights_meet_rotated_activations(block: int, rng: Rng) -> None:
    rotation = HadamardRotation(block, {256: rng.choice([-1, 1], 256).astype(np.int8)})
    tensor = ternary(rng, 40, 256)
    layer = pq2.Pq2Linear(upload(tensor), rotation)
    x, exact = stored(rng.standard_normal((3, 256)), "float16")
    found = pq2._rotated(x, layer.signs, block)
    np.testing.assert_allclose(found.cpu().numpy(), rotation.fold(exact), rtol=0, atol=2e-6)
    assert distance(layer(x, torch.float32), expected(found.cpu().numpy(), tensor)) < 4e-7
    assert layer(x).dtype == torch.float16


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """A planes file of every kind of tensor, and what is in it."""
    rng = np.random.default_rng(5)
    tensors = {
        "q": ternary(rng, 24, 256),
        "k": ternary(rng, 8, 256, levels=3),
        "down": ternary(rng, 30, 128),
        "up": CodebookTensor(np.zeros((4, 16), np.uint8), np.ones((4, 16), np.float16)),
        "norm": DenseTensor(np.ones(5, np.float32)),
    }
    entries = (
        PlanesEntry("qk", (PlanesPart("q", (24, 256)), PlanesPart("k", (8, 256))), 4, None),
        PlanesEntry("down", (PlanesPart("down", (30, 128)),), 4, None),
        TilesEntry("up", (PlanesPart("up", (4, 16)),), Codebook4Tiles(4, 16, 16), None),
    )
    path = tmp_path_factory.mktemp("planes") / "model.safetensors"
    write_planes(path, PlanesLayout(entries, {"norm": (np.dtype(np.float32), (5,))}), tensors.__getitem__)
    return path, tensors


def test_a_file(file: tuple[Path, dict], rng: Rng) -> None:
    path, tensors = file
    layers = pq2.open_pq2(path, device=DEVICE)
    assert sorted(layers) == ["down", "qk"]
    layer = layers["qk"]
    assert (layer.in_features, layer.out_features) == (256, 32)
    assert repr(layer) == "Pq2Linear(in_features=256, out_features=32)"
    x, exact = stored(rng.standard_normal((2, 256)), "float16")
    y = layer(x, torch.float32)
    for name in ("q", "k"):
        assert distance(y[:, layer.parts[name]], expected(exact, tensors[name])) < 4e-7
    with PlanesFile.open(path) as source:
        np.testing.assert_array_equal(layer.planes.cpu().numpy(), source.raw("qk"))
    again = pq2.Pq2Linear(torch.zeros_like(layer.planes))
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again(x, torch.float32), y)
    layer.warm_up(torch.float16)


def test_what_a_file_does_not_hold_is_refused(file: tuple[Path, dict], tmp_path: Path) -> None:
    path, _ = file
    with pytest.raises(FormatError, match="no matrix named 'q' of its own; it is a part of 'qk'"):
        pq2.open_pq2(path, ["q"], DEVICE)
    with pytest.raises(FormatError, match=r"no matrix named 'norm'$"):
        pq2.open_pq2(path, ["norm"], DEVICE)
    with pytest.raises(
        UnsupportedModelError, match="codebook4-v1; there are Triton kernels for planes-v1 only"
    ):
        pq2.open_pq2(path, ["up"], DEVICE)
    entry = TilesEntry("up", (PlanesPart("up", (4, 16)),), Codebook4Tiles(4, 16, 16), None)
    tensor = CodebookTensor(np.zeros((4, 16), np.uint8), np.ones((4, 16), np.float16))
    write_planes(tmp_path / "other.safetensors", PlanesLayout((entry,)), lambda name: tensor)
    with pytest.raises(UnsupportedModelError, match=r"holds no planes-v1 matrix.* it holds codebook4-v1"):
        pq2.open_pq2(tmp_path / "other.safetensors", device=DEVICE)


def test_what_export_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: Rng) -> None:
    """The whole way, by the example of docs/formats/planes.md: quantize rotated weights, export them, multiply."""
    root = Path(trapetum.__file__).resolve().parents[1]
    art = trapetum.quantize_model(
        root / "models" / "books-2m", tmp_path / "art", scheme="ternary", hadamard=True
    ).out
    folder = trapetum.export_artifact(art, "planes", tmp_path / "model-planes", fuse=True)
    page = (root / "docs" / "formats" / "planes.md").read_text("utf-8")
    example = page.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    with PlanesFile.open(folder / "model.safetensors") as file:
        name = next(n for n in file.entries if "qkv" in n)
        x, exact = stored(rng.standard_normal((2, 3, file.entries[name].in_features)), "bfloat16")
        seen = {"x": x}
        exec(example.replace('"model-planes"', f'"model-planes", device="{DEVICE}"'), seen)
        layer, flat = seen["layer"], exact.reshape(6, -1)
        assert seen["y"].shape == (2, 3, layer.out_features)
        assert torch.equal(seen["q"], seen["y"][..., : seen["q"].shape[-1]])
        wide = layer(x, torch.float32).reshape(6, -1)
        for part, rows in layer.parts.items():
            turned = file.rotation_of(part).fold(flat)
            assert (
                distance(wide[:, rows], expected(turned, file.load(part))) < 1e-4
            )  # here and there a code is a tie
