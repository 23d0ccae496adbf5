"""The readers that are fuzzed: which files, what is done with them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuzz_inputs import PACKED

import trapetum
from trapetum.batch import read_jobs
from trapetum.export.report_page import report_html
from trapetum.formats.artifact import Artifact
from trapetum.formats.checksums import check_files
from trapetum.formats.imatrix import open_statistics
from trapetum.formats.output_folder import output_state
from trapetum.formats.parts import read_part
from trapetum.formats.source import open_source
from trapetum.measured import measured_rows
from trapetum.push import push_artifact
from trapetum.quantize.card import read_front_matter
from trapetum.quantize.journal import Journal
from trapetum.quantize.recipe import resolve_recipe
from trapetum.quantize.shared_job import merge_parts
from trapetum.runtime.inspect import inspect_path
from trapetum.runtime.tokenizer import Tokenizer
from trapetum.runtime.verify import verify_path


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


def chat(path: Path) -> None:
    """The chat template, on a question."""
    Tokenizer(path / "tokenizer.json").chat([{"role": "user", "content": "a b"}])


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
        *(Target(kind, _copy(kind), (read_source,), _WEIGHTS) for kind in PACKED),
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
        Target("chat", _copy("model"), (chat,), ("*.jinja", "tokenizer_config.json")),
        Target("card", _copy("model"), (read_front_matter,), ("README.md",)),
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
