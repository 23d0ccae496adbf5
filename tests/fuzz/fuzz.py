"""Fuzz targets for every reader: valid small files, damaged at random; nothing but a TrapetumError may come of it.

    python tests/fuzz/fuzz.py --seconds 30                  # each target for 30 s; a JSON line with counts for each
    python tests/fuzz/fuzz.py --target gguf --seed 7 ...    # one target; the seed makes a run repeatable
    python tests/fuzz/fuzz.py --atheris --target cbk        # guided by coverage, where atheris is installed

An input that ends in any other exception, takes longer than SLOWEST seconds, or kills the process is a fault; it is
kept in the folder that ``--keep`` names.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import trapetum
from trapetum.batch import read_jobs
from trapetum.errors import TrapetumError
from trapetum.export.report_page import report_html
from trapetum.formats.artifact import Artifact
from trapetum.formats.checksums import check_files
from trapetum.formats.imatrix import MomentsWriter, open_statistics, write_imatrix
from trapetum.formats.output_folder import output_state
from trapetum.formats.parts import read_part, write_part
from trapetum.formats.safetensors_writer import Entry, SafetensorsWriter
from trapetum.formats.source import open_source
from trapetum.measured import measured_rows
from trapetum.push import push_artifact
from trapetum.quantize.journal import Journal
from trapetum.quantize.recipe import resolve_recipe
from trapetum.quantize.shared_job import merge_parts
from trapetum.runtime.inspect import inspect_path
from trapetum.runtime.tokenizer import Tokenizer
from trapetum.runtime.verify import verify_path
from trapetum.tensors import DenseTensor

SLOWEST = 20.0  # seconds for one input, on a busy machine
_HEAD = 4096
_NUMBERS = (
    0,
    1,
    2,
    3,
    7,
    8,
    31,
    63,
    64,
    127,
    128,
    255,
    256,
    65535,
    1 << 31,
    (1 << 32) - 1,
    1 << 53,
    1 << 62,
    (1 << 63) - 1,
)
_TEXTS = (
    b"null",
    b"-1",
    b"1e999",
    b"[]",
    b"{}",
    b'""',
    b"true",
    b"9" * 40,
    b'"\\ud800"',
    b"NaN",
    b"[[[[[[[[[[",
    b"../",
    b"\x00",
)


# ---------------------------------------------------------------------------- valid inputs
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _tokenizer() -> dict[str, Any]:
    pieces = ["<unk>", "<s>", "</s>", *(chr(0x4E00 + i) for i in range(61))]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    steps: list[dict[str, Any]] = [
        {"type": "Prepend", "prepend": "\u2581"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": pieces[i], **plain} for i in range(3)],
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {p: i for i, p in enumerate(pieces)},
            "merges": [],
        },
    }


def make_model(folder: Path) -> Path:
    """A tied Llama of one layer, in two files with an index."""
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (64, 256), "model.norm.weight": (256,)}
    for part, rows in {"q": 256, "k": 256, "v": 256, "o": 256}.items():
        shapes[f"model.layers.0.self_attn.{part}_proj.weight"] = (rows, 256)
    shapes |= {f"model.layers.0.mlp.{part}_proj.weight": (256, 256) for part in ("gate", "up", "down")}
    shapes |= {f"model.layers.0.{part}_layernorm.weight": (256,) for part in ("input", "post_attention")}
    folder.mkdir(parents=True)
    names = list(shapes)
    weight_map = {}
    for number, part in enumerate((names[:6], names[6:]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        with SafetensorsWriter(
            folder / file, [Entry(n, np.dtype(np.float16), shapes[n]) for n in part]
        ) as writer:
            for name in part:
                writer.write(name, (rng.standard_normal(shapes[name]) / 16).astype(np.float16))
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer()))
    return folder


def make_fp8(folder: Path) -> Path:
    """Two matrices in 8-bit floats with a scale for each block of 128 x 128, as DeepSeek's checkpoints are."""
    rng = np.random.default_rng(1)
    folder.mkdir(parents=True)
    codes = np.setdiff1d(np.arange(256, dtype=np.uint8), [0x7F, 0xFF])
    tensors: dict[str, np.ndarray[Any, Any]] = {"model.embed_tokens.weight": np.ones((64, 256), np.float16)}
    for part in ("gate", "up"):
        name = f"model.layers.0.mlp.{part}_proj.weight"
        tensors[name] = rng.choice(codes, (256, 256)).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = rng.uniform(0.1, 0.2, (2, 2)).astype(np.float32)
    entries = [Entry(n, a.dtype, a.shape) for n, a in tensors.items()]
    with SafetensorsWriter(folder / "model.safetensors", entries) as writer:
        for name, array in tensors.items():
            writer.write(name, array)
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": settings}))
    return folder


# ---------------------------------------------------------------------------- what is done with an input
def read_source(path: Path) -> None:
    """Open whatever it is, list it, decode all of it."""
    inspect_path(path)
    with open_source(path) as source:
        for name in source.names():
            source.shape(name), source.dtype(name), source.layout(name)
            source.load(name, slice(0, 2)).dequantize()
            source.load(name).dequantize()
            source.release(name)
        source.tokenizer_file(), source.side_files()
        if (path if path.is_dir() else path.with_name("config.json")).exists():
            _ = source.config


def verify(path: Path) -> None:
    """Checksums, the compiled decoders, finite values."""
    verify_path(path, threads=1)


def plan(path: Path) -> None:
    """What quantize reads before its work."""
    trapetum.quantize_model(path, path.parent / "never", dry_run=True, threads=1)


def read_artifact(path: Path) -> None:
    """As a source, by its lists, and as a report."""
    read_source(path)
    with Artifact.open(path) as artifact:
        artifact.check_sums()
    report_html(path)
    push_artifact(path, "a/b", dry_run=True)


def read_statistics(path: Path) -> None:
    """Every diagonal and moment."""
    with open_statistics(path) as found:
        for name in found.names():
            found.diagonal(name, 256)
            found.moment(name, 256)
            found.shared(name)


def read_job(path: Path) -> None:
    """An unfinished job: its state, its parts, and a merge of them."""
    output_state(path)
    Journal(path).read()
    for index in range(3):
        read_part(path / ".trapetum" / "parts", index, f"t{index}")
    inspect_path(path)
    merge_parts(path)


def read_tokenizer(path: Path) -> None:
    """Text to ids and back."""
    tokenizer = Tokenizer(path)
    tokenizer.decode(tokenizer.encode("a b \u4e00\u4e01"))


# ---------------------------------------------------------------------------- targets
@dataclass
class Target:
    """One reader.

    Parameters
    ----------
    name : str
    make : callable
        (base, folder) -> the path that is opened; ``base`` holds the valid files, ``folder`` gets copies.
    uses : tuple of callables of Path
        Taken in turn.
    files : tuple of str
        Patterns of the files that are damaged; the path itself where it is a file.
    """

    name: str
    make: Callable[[Path, Path], Path]
    uses: tuple[Callable[[Path], Any], ...]
    files: tuple[str, ...] = ("*",)


def _copy(name: str, member: str = "") -> Callable[[Path, Path], Path]:
    """A copy of a valid file or folder; opened is it, or a member of it."""

    def make(base: Path, folder: Path) -> Path:
        copy = shutil.copytree if (base / name).is_dir() else shutil.copyfile
        made = Path(copy(base / name, folder / name))
        return made / member if member else made

    return make


def make_base(base: Path) -> Path:
    """All valid inputs."""
    model = make_model(base / "model")
    shutil.copyfile(model / "model-00001-of-00002.safetensors", base / "x.safetensors")
    schemes = {"codebook": "kmeans", "ternary": "ternary", "blocks": "gguf:Q4_K", "additive": "additive"}
    for name, scheme in schemes.items():
        trapetum.quantize_model(model, base / name, scheme=scheme, effort="fast", threads=1)
    trapetum.export_artifact(base / "codebook", "cbk", base / "x.cbk")
    trapetum.export_artifact(base / "codebook", "cbk", base / "cbk")
    for name, kind in {"ternary": "x2.gguf", "blocks": "x4.gguf"}.items():
        trapetum.export_artifact(base / name, "gguf", base / kind)
    trapetum.export_artifact(base / "additive", "cbk", base / "additive.cbk")
    for name, made in {"ternary": "planes", "codebook": "tiles", "additive": "tiles-additive"}.items():
        trapetum.export_artifact(base / name, "planes", base / made)
    make_fp8(base / "fp8")
    weight = "model.layers.0.self_attn.q_proj.weight"
    write_imatrix(base / "x.imatrix", {weight: (np.ones(256, np.float32), 9)}, datasets=["a"])
    with MomentsWriter(base / "x.moments", [((weight,), 256)]) as writer:
        writer.write((weight,), np.eye(256, dtype=np.float32), 9)
    entry = b"".join(
        [
            len(weight).to_bytes(4, "little"),
            weight.encode(),
            (9).to_bytes(4, "little"),
            (256).to_bytes(4, "little"),
        ]
    )
    (base / "x.dat").write_bytes((1).to_bytes(4, "little") + entry + np.ones(256, np.float32).tobytes())
    (base / "recipe.toml").write_text(
        'name = "mine"\nbits = 4\nscheme = "kmeans"\nfallback = ["gguf:Q8_0"]\n[[rules]]\nrole = ["attention", "mlp"]\n'
        'layers = "0,3-5"\nbits = 8\n[[rules]]\nglob = "*.down_proj.weight"\nkeep = true\n'
    )
    (base / "jobs.toml").write_text(
        '[defaults]\nbits = 3\n[[jobs]]\nmodel = "a"\nout = "b"\nexport = ["cbk"]\n'
    )
    (base / "result.json").write_text(
        json.dumps({"ppl": 3.5, "checks": [{"name": "a", "ok": True, "detail": "b"}]})
    )
    _unfinished_job(base / "job", model)
    return base


def _unfinished_job(folder: Path, model: Path) -> None:
    """A folder whose job was stopped when the first of its tensors was made."""
    from trapetum.progress import Progress

    class Stop(Progress):
        def advance(self, amount: int, line: str | None = None) -> None:
            if line is not None:
                raise KeyboardInterrupt

    try:
        trapetum.quantize_model(model, folder, effort="fast", threads=1, progress=Stop())
    except KeyboardInterrupt:
        pass
    parts = folder / ".trapetum" / "parts"
    write_part(
        parts, 0, "t0", {"": np.zeros((2, 3), np.float32)}, _draft(DenseTensor(np.zeros((2, 3), np.float32)))
    )
    (folder / ".trapetum" / "commit.json").write_text(json.dumps({"files": ["a"], "remove": ["b"]}))


def _draft(tensor: DenseTensor) -> dict[str, Any]:
    made = {"layout": tensor.layout, "shape": tensor.shape, "params": {}}
    return made | {"scheme": {"name": "keep"}, "relative_error": None}


_WEIGHTS = ("*.json", "*.safetensors")
TARGETS: dict[str, Target] = {
    t.name: t
    for t in (
        Target("safetensors", _copy("x.safetensors"), (read_source,)),
        Target("checkpoint", _copy("model"), (plan, read_source), _WEIGHTS),
        Target(
            "artifact", _copy("codebook"), (read_artifact, verify), (*_WEIGHTS, "SHA256SUMS", "run.jsonl")
        ),
        Target("artifact-ternary", _copy("ternary"), (read_artifact, verify), _WEIGHTS),
        Target("artifact-blocks", _copy("blocks"), (read_artifact, verify), _WEIGHTS),
        Target("artifact-additive", _copy("additive"), (read_artifact, verify), _WEIGHTS),
        Target("fp8", _copy("fp8"), (read_source,), _WEIGHTS),
        Target("cbk", _copy("x.cbk"), (read_source, verify)),
        Target("cbk-additive", _copy("additive.cbk"), (read_source, verify)),
        Target("cbk-folder", _copy("cbk"), (verify, read_source), ("*.json",)),
        Target("gguf-ternary", _copy("x2.gguf"), (read_source, verify, plan)),
        Target("gguf-blocks", _copy("x4.gguf"), (read_source, verify, plan)),
        Target("planes", _copy("planes"), (read_source, verify)),
        Target("tiles", _copy("tiles"), (read_source, verify)),
        Target("tiles-additive", _copy("tiles-additive"), (read_source, verify)),
        Target("imatrix-gguf", _copy("x.imatrix"), (read_statistics,)),
        Target("imatrix-dat", _copy("x.dat"), (read_statistics,)),
        Target("moments", _copy("x.moments"), (read_statistics,)),
        Target("recipe", _copy("recipe.toml"), (resolve_recipe,)),
        Target("jobs", _copy("jobs.toml"), (read_jobs,)),
        Target("results", _copy("result.json"), (lambda path: measured_rows([path]),)),
        Target("sums", _copy("planes", "SHA256SUMS"), (check_files,)),
        Target("job", _copy("job"), (read_job,), (".trapetum/*.json", ".trapetum/parts/*")),
        Target("tokenizer", _copy("model", "tokenizer.json"), (read_tokenizer,)),
    )
}


def _golden() -> dict[str, Path]:
    """Files that other software wrote: one travels with the tests, others may lie beside the source tree."""
    root = Path(__file__).resolve().parents[2]
    shared = Path(os.environ.get("TRAPETUM_SHARED", root.parent / "shared"))
    return {
        p.stem: p
        for folder in (shared / "golden" / "cbk", root / "tests" / "golden")
        for p in folder.glob("*.cbk")
    }


def _from(path: Path) -> Callable[[Path, Path], Path]:
    return lambda base, folder: Path(shutil.copyfile(path, folder / path.name))


TARGETS |= {
    f"golden-{n}": Target(f"golden-{n}", _from(p), (read_source, verify)) for n, p in _golden().items()
}

# ---------------------------------------------------------------------------- damage
Step = tuple[int, float, int]  # which damage, where (0 to 1), a number


def damage(data: bytes, steps: list[Step]) -> bytes:
    """Apply a list of damages; places are counted in the first 4 KiB two times of three: headers are there."""
    out = bytearray(data)
    for kind, where, number in steps:
        reach = len(out) if number % 3 == 0 else min(len(out), _HEAD)
        at = min(int(where * (reach + 1)), len(out))
        _DAMAGES[kind % len(_DAMAGES)](out, at, number)
    return bytes(out)


def _flip(out: bytearray, at: int, number: int) -> None:
    if at < len(out):
        out[at] ^= 1 << number % 8


def _byte(out: bytearray, at: int, number: int) -> None:
    if at < len(out):
        out[at] = number % 256


def _word(size: int) -> Callable[[bytearray, int, int], None]:
    def write(out: bytearray, at: int, number: int) -> None:
        value = _NUMBERS[number % len(_NUMBERS)] % (1 << 8 * size)
        at -= at % (4 if number % 2 else 1)
        out[at : at + size] = value.to_bytes(size, "little")

    return write


def _cut(out: bytearray, at: int, number: int) -> None:
    del out[at:]


def _delete(out: bytearray, at: int, number: int) -> None:
    del out[at : at + 1 + number % 64]


def _repeat(out: bytearray, at: int, number: int) -> None:
    out[at:at] = out[at : at + 1 + number % 64]


def _insert(out: bytearray, at: int, number: int) -> None:
    out[at:at] = number.to_bytes(8, "little")[: 1 + number % 8]


def _token(out: bytearray, at: int, number: int) -> None:
    """Another number or text where a number stands, as in JSON and TOML."""
    found = re.compile(rb"-?\d+(?:\.\d+)?|true|false|null|\"[^\"]*\"").search(out, at)
    if found is not None:
        choice = number % (len(_TEXTS) + len(_NUMBERS))
        new = _TEXTS[choice] if choice < len(_TEXTS) else str(_NUMBERS[choice - len(_TEXTS)]).encode()
        out[found.start() : found.end()] = new


def _swap(out: bytearray, at: int, number: int) -> None:
    size = 1 + number % 32
    other = (at + number) % (len(out) + 1)
    first, second = bytes(out[at : at + size]), bytes(out[other : other + size])
    out[at : at + size] = second
    out[other : other + size] = first


_DAMAGES = (_flip, _byte, _word(4), _word(8), _cut, _delete, _repeat, _insert, _token, _token, _swap)


# ---------------------------------------------------------------------------- running
@dataclass
class Counts:
    """What became of the inputs of a target."""

    executions: int = 0
    accepted: int = 0
    refused: int = 0
    slowest: float = 0.0
    faults: list[str] = field(default_factory=list)


class Bench:
    """A target with its valid files; :meth:`run` damages one, uses it, and puts it back."""

    def __init__(self, target: Target, base: Path, folder: Path) -> None:
        self.target, self.counts = target, Counts()
        folder.mkdir(parents=True)
        self.path = target.make(base, folder)
        members = (
            [self.path]
            if self.path.is_file()
            else sorted({p for g in target.files for p in self.path.glob(g)})
        )
        self.files = {p: p.read_bytes() for p in members if p.is_file()}
        self.folder = folder
        self.whole = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}

    def run(self, pick: int, steps: list[Step]) -> None:
        """One input.

        Raises
        ------
        BaseException
            Whatever is no TrapetumError.
        """
        file = list(self.files)[pick % len(self.files)]
        file.write_bytes(damage(self.files[file], steps))
        use = self.target.uses[(pick // len(self.files)) % len(self.target.uses)]
        begun = time.perf_counter()
        try:
            use(self.path)
            self.counts.accepted += 1
        except TrapetumError as error:
            if not error.message or "\n" in error.message:
                raise AssertionError(f"not one sentence: {error.message!r}") from error
            self.counts.refused += 1
        finally:
            self.counts.executions += 1
            self._restore()
        seconds = time.perf_counter() - begun
        self.counts.slowest = max(self.counts.slowest, seconds)
        assert seconds < SLOWEST, f"{seconds:.1f} s"

    def _restore(self) -> None:
        """A use may have written, as a merge does."""
        for path in self.folder.rglob("*"):
            if path.is_file() and path not in self.whole:
                path.unlink()
        for path, data in self.whole.items():
            if not path.is_file() or path.stat().st_size != len(data) or path.read_bytes() != data:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)


def random_steps(rng: random.Random) -> list[Step]:
    """One to four damages."""
    return [
        (rng.randrange(64), rng.random(), rng.getrandbits(60)) for _ in range(rng.choice((1, 1, 1, 2, 3, 4)))
    ]


def fuzz(bench: Bench, seconds: float, seed: int, keep: Path | None = None) -> Counts:
    """Damage at random for so long."""
    rng = random.Random(f"{bench.target.name}{seed}")
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pick, steps = rng.getrandbits(20), random_steps(rng)
        try:
            bench.run(pick, steps)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            where = f"{type(error).__name__}: {error}; pick {pick}, steps {steps}"
            bench.counts.faults.append(where)
            if keep is not None:
                keep.mkdir(parents=True, exist_ok=True)
                file = list(bench.files)[pick % len(bench.files)]
                (keep / f"{bench.target.name}-{pick}-{file.name}").write_bytes(
                    damage(bench.files[file], steps)
                )
    return bench.counts


def _guided(bench: Bench, arguments: list[str]) -> None:
    """libFuzzer through atheris: its bytes replace a whole file."""
    import atheris

    def one(data: bytes) -> None:
        if len(data) < 2:
            return
        file = list(bench.files)[data[0] % len(bench.files)]
        bench.files[file] = data[2:]
        bench.run(data[0] + len(bench.files) * data[1], [])

    atheris.instrument_all()
    atheris.Setup([sys.argv[0], *arguments], one)
    atheris.Fuzz()


def main() -> None:
    """Run the targets that were asked for; exit with 1 if any input was a fault."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", action="append", choices=[*TARGETS], help="all by default")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--atheris", action="store_true")
    options, rest = parser.parse_known_args()
    warnings.simplefilter("error")  # a reader that warns has computed with what it should have refused
    bad = 0
    with tempfile.TemporaryDirectory(prefix="trapetum-fuzz-") as root:
        base = make_base(Path(root) / "base")
        for name in options.target or TARGETS:
            bench = Bench(TARGETS[name], base, Path(root) / "work" / name)
            if options.atheris:
                _guided(bench, rest)
                return
            counts = fuzz(bench, options.seconds, options.seed, options.keep)
            bad += len(counts.faults)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            print(json.dumps({"target": name, **counts.__dict__, "peak_rss_mib": peak // 1024}), flush=True)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
