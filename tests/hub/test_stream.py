"""--stream-download: the same bytes as the ordinary route, two weight files on disk at most, and a kill at any time."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import trapetum
from trapetum.cli.app import app
from trapetum.errors import CheckpointError, OutputError, RecipeError
from trapetum.hub_stream import open_stream
from trapetum.progress import Progress

safetensors_numpy = pytest.importorskip("safetensors.numpy")

REPO = "acme/books"
TOKEN = "hf_secretsecretsecret"
SHARDS = 5
OPTIONS: dict[str, Any] = {"effort": "fast", "max_shard_size": 1_500_000}


def split(model: Path, folder: Path, change: dict[str, Any] | None = None) -> Path:
    """The demo model in several files with an index."""
    tensors = safetensors_numpy.load_file(model / "model.safetensors") | (change or {})
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    names = list(tensors)
    weight_map = {}
    for s in range(SHARDS):
        file = f"model-{s + 1:05d}-of-{SHARDS:05d}.safetensors"
        mine = names[s * len(names) // SHARDS : (s + 1) * len(names) // SHARDS]
        safetensors_numpy.save_file({n: tensors[n] for n in mine}, folder / file)
        weight_map |= dict.fromkeys(mine, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


@pytest.fixture(scope="module")
def model(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return split(demo_model, tmp_path_factory.mktemp("stream") / "model")


@pytest.fixture
def repo(hub: Any, model: Path) -> str:
    hub.commit(REPO, files(model))
    return REPO


def identity(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "run.jsonl"}


class Watch(Progress):
    """Sees which weight files are here whenever anything happens; may stop at one tensor."""

    def __init__(self, out: Path, stop: int = -1) -> None:
        self.folder, self.stop = out / ".trapetum" / "stream", stop
        self.most, self.lines = 0, 0
        self.notes: list[str] = []

    def advance(self, amount: int, line: str | None = None) -> None:
        self.most = max(
            self.most, len(list(self.folder.rglob("*.safetensors"))) if self.folder.exists() else 0
        )
        if line is not None and "bpw" in line:
            self.lines += 1
            if self.lines == self.stop:
                raise KeyboardInterrupt

    def note(self, text: str) -> None:
        self.notes.append(text)


def temporary() -> set[str]:
    import tempfile

    return {n for n in os.listdir(tempfile.gettempdir()) if n.startswith("trapetum-stream-")}


def test_same_bytes_and_two_files_at_most(hub: Any, repo: str, tmp_path: Path) -> None:
    before = temporary()
    watch = Watch(tmp_path / "streamed")
    report = trapetum.quantize_model(
        repo, tmp_path / "streamed", stream_download=True, progress=watch, **OPTIONS
    )
    assert 1 <= watch.most <= 2
    cached = [p for p in (tmp_path / "cache").rglob("*") if p.name.endswith(".safetensors")]
    assert cached == []
    assert temporary() == before
    ordinary = trapetum.quantize_model(repo, tmp_path / "ordinary", **OPTIONS)
    assert identity(tmp_path / "streamed") == identity(tmp_path / "ordinary")
    assert len(list((tmp_path / "streamed").glob("model-*.safetensors"))) > 1
    assert (report.bpw, report.errors) == (ordinary.bpw, ordinary.errors)
    assert report.notes == ordinary.notes
    source = json.loads((tmp_path / "streamed" / "trapetum.json").read_bytes())["source"]
    assert (source["repo"], source["commit"]) == (REPO, hub.heads[REPO])
    assert len(source["files"]) >= SHARDS + 3


@pytest.mark.parametrize("stop", [1, 9, 20])
def test_goes_on_after_a_stop_without_fetching_what_is_done(
    hub: Any, repo: str, tmp_path: Path, stop: int
) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        trapetum.quantize_model(repo, out, stream_download=True, progress=Watch(out, stop), **OPTIONS)
    hub.requests.clear()
    report = trapetum.quantize_model(repo, out, stream_download=True, **OPTIONS)
    assert report.resumed == stop
    whole = len({p for m, p, _ in hub.requests if m == "HEAD" and p.endswith(".safetensors")})
    assert whole <= SHARDS - stop * SHARDS // 29  # files whose tensors are all there are not asked for
    trapetum.quantize_model(repo, tmp_path / "ordinary", **OPTIONS)
    assert identity(out) == identity(tmp_path / "ordinary")


def test_a_cut_off_download_goes_on(
    hub: Any,
    repo: str,
    tmp_path: Path,
    waits: list[float],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 14)

    class Cut(Progress):
        def note(self, text: str) -> None:
            if text.startswith("weight file 1 "):
                hub.fault("model-00002", 200, times=1, cut=True)

    hub.fault("model-00003", 200, times=1, cut=True)  # its header
    trapetum.quantize_model(repo, tmp_path / "out", stream_download=True, progress=Cut(), **OPTIONS)
    assert waits
    assert capfd.readouterr() == ("", "")  # the client's own words would hold addresses that may be signed
    assert [f.times for f in hub.faults] == [0, 0]
    assert any(name == "model-00002-of-00005.safetensors" and first > 10_000 for name, first, _ in hub.ranges)
    assert trapetum.open_artifact(tmp_path / "out").check_sums() == []


@pytest.mark.parametrize(
    ("pattern", "status", "headers", "message"),
    [
        ("GET /api/models", 401, {}, "refuses the token: it is missing, wrong or expired"),
        ("GET /api/models", 403, {"X-Error-Code": "GatedRepo"}, "licence must be accepted"),
        ("GET /api/models", 404, {"X-Error-Code": "RepoNotFound"}, "nor a model on the Hub"),
        ("GET /api/models", 429, {"Retry-After": "2"}, "asks to slow down"),
        ("GET .*00004.*safetensors", 503, {}, "HTTP status 503"),
        ("(HEAD|GET) .*00003.*safetensors", 403, {}, "denies access"),
        ("(HEAD|GET) .*00001.*safetensors", 404, {"X-Error-Code": "EntryNotFound"}, "no such model or file"),
    ],
)
def test_refusals(
    hub: Any,
    repo: str,
    tmp_path: Path,
    waits: list[float],
    pattern: str,
    status: int,
    headers: dict[str, str],
    message: str,
) -> None:
    hub.fault(pattern, status, headers=headers)
    options = ["--stream-download", "--effort", "fast", "--token", TOKEN, "-o", str(tmp_path / "out")]
    result = CliRunner().invoke(app, ["quantize", repo, *options])
    assert result.exit_code == 1
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert REPO in errors[0]
    assert TOKEN not in result.output
    assert not (tmp_path / "out").exists()  # no weight was quantized yet: headers come first
    hub.faults.clear()
    hub.token = TOKEN
    assert CliRunner().invoke(app, ["quantize", repo, *options]).exit_code == 0
    assert TOKEN not in "".join(p.read_text(errors="replace") for p in (tmp_path / "out").iterdir())


def test_a_failure_in_the_middle_keeps_what_is_done(
    hub: Any, repo: str, tmp_path: Path, waits: list[float]
) -> None:
    out = tmp_path / "out"
    hub.fault("HEAD .*00004.*safetensors", 403)  # the header comes by GET, the whole file begins with HEAD
    with pytest.raises(CheckpointError, match=r"books/model-00004-of-00005\.safetensors: .* denies access"):
        trapetum.quantize_model(repo, out, stream_download=True, **OPTIONS)
    assert (out / ".trapetum").is_dir()
    hub.faults.clear()
    assert trapetum.quantize_model(repo, out, stream_download=True, **OPTIONS).resumed > 10
    assert not (out / ".trapetum").exists()


def test_what_a_killed_run_left_takes_no_room(hub: Any, repo: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        trapetum.quantize_model(repo, out, stream_download=True, progress=Watch(out, 12), **OPTIONS)
    folder = out / ".trapetum" / "stream"
    half = folder / ".cache" / "huggingface" / "download" / "x.0123.incomplete"
    half.parent.mkdir(parents=True, exist_ok=True)
    half.write_bytes(b"half")
    (folder / "model-00001-of-00005.safetensors").write_bytes(b"done with")

    class Look(Progress):
        def advance(self, amount: int, line: str | None = None) -> None:
            assert not half.exists()
            assert not (folder / "model-00001-of-00005.safetensors").exists()

    trapetum.quantize_model(repo, out, stream_download=True, progress=Look(), **OPTIONS)


def test_what_came_is_compared(hub: Any, repo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    real = huggingface_hub.hf_hub_download

    def damaged(*args: Any, **options: Any) -> str:
        path = Path(real(*args, **options))
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        return str(path)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", damaged)
    with pytest.raises(CheckpointError, match=r"what was downloaded has sha256 .*; the Hub announces"):
        trapetum.quantize_model(repo, tmp_path / "out", stream_download=True, **OPTIONS)
    monkeypatch.undo()


def test_two_heads_are_compared_without_their_files(hub: Any, demo_model: Path, tmp_path: Path) -> None:
    """A tied model that also stores its head: both are looked at before any file is here."""
    tensors = safetensors_numpy.load_file(demo_model / "model.safetensors")
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}
    hub.commit(REPO, files(split(demo_model, tmp_path / "model", head)))
    trapetum.quantize_model(REPO, tmp_path / "streamed", stream_download=True, **OPTIONS)
    assert any(last - first > 100_000 for _, first, last in hub.ranges)
    trapetum.quantize_model(REPO, tmp_path / "ordinary", **OPTIONS)
    assert identity(tmp_path / "streamed") == identity(tmp_path / "ordinary")


def test_taking_over_is_settled_file_by_file(hub: Any, demo_model: Path, tmp_path: Path) -> None:
    """Ternary weights in some files, none in others; a second run takes over what the first settled."""
    tensors = safetensors_numpy.load_file(demo_model / "model.safetensors")
    rng = np.random.default_rng(0)
    changed = {
        n: (rng.integers(-1, 2, t.shape) * 0.5).astype(t.dtype)
        for n, t in tensors.items()
        if "layers.1.mlp" in n
    }
    hub.commit(REPO, files(split(demo_model, tmp_path / "model", changed)))
    out = tmp_path / "streamed"
    options = {"scheme": "asis", "stream_download": True}
    with pytest.raises(KeyboardInterrupt):
        trapetum.quantize_model(REPO, out, progress=Watch(out, 15), **options)
    report = trapetum.quantize_model(REPO, out, **options)
    ordinary = trapetum.quantize_model(REPO, tmp_path / "ordinary", scheme="asis")
    assert identity(out) == identity(tmp_path / "ordinary")
    assert report.bpw == ordinary.bpw


def test_a_nan_is_named(hub: Any, demo_model: Path, tmp_path: Path) -> None:
    tensors = safetensors_numpy.load_file(demo_model / "model.safetensors")
    name = "model.layers.2.mlp.up_proj.weight"
    broken = tensors[name].copy()
    broken[3, 4] = np.nan
    hub.commit(REPO, files(split(demo_model, tmp_path / "model", {name: broken})))
    with pytest.raises(CheckpointError, match=rf"tensor {name} holds 1 NaN"):
        trapetum.quantize_model(REPO, tmp_path / "out", stream_download=True, **OPTIONS)


def test_a_dry_run_fetches_headers_only(hub: Any, repo: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app, ["quantize", repo, "--stream-download", "--dry-run", "--json", "-o", "x"]
    )
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert any("is not here" in note for note in data["notes"])
    assert not Path("x").exists()
    assert hub.asked("HEAD .*safetensors$") == 0
    assert max(last - first for _, first, last in hub.ranges) <= 256 << 10


def test_little_space_is_said_before_the_work(
    hub: Any, repo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trapetum.formats.atomic._free", lambda path: 3_000_000)
    with pytest.raises(OutputError, match="bytes are needed, 3,000,000 bytes are free"):
        trapetum.quantize_model(repo, tmp_path / "out", stream_download=True, **OPTIONS)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "options", [{"part": "1/2"}, {"workers": 2}, {"scheduler": "tcp://x:1"}, {"calibrate": "text.txt"}]
)
def test_what_does_not_go_with_it(hub: Any, repo: str, options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=f"stream_download and {next(iter(options))} exclude each other"):
        trapetum.quantize_model(repo, tmp_path / "out", stream_download=True, **options)


def test_what_cannot_be_streamed(hub: Any, demo_model: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="is here already"):
        trapetum.quantize_model(demo_model, tmp_path / "out", stream_download=True)
    hub.commit("acme/gguf", {"model.gguf": b"GGUF" + bytes(20_000), "config.json": b"{}"})
    with pytest.raises(CheckpointError, match=r"holds no \.safetensors file"):
        trapetum.quantize_model("acme/gguf", tmp_path / "out", stream_download=True)
    hub.commit("acme/bad", {"model.safetensors": b"\xff" * 20_000, "config.json": b"{}"})
    with pytest.raises(trapetum.errors.FormatError, match="declares a header"):
        trapetum.quantize_model("acme/bad", tmp_path / "out", stream_download=True)


def test_the_end_of_a_job_ends_a_download(hub: Any, repo: str, tmp_path: Path) -> None:
    """An interrupt must not wait for a file of hours."""
    with open_stream(repo, token=TOKEN) as stream:
        assert TOKEN not in repr(stream)
        stream.end()
        caught: list[BaseException] = []

        def fetch() -> None:
            try:
                stream.fetch("model-00001-of-00005.safetensors", tmp_path / "x")
            except BaseException as error:
                caught.append(error)

        thread = threading.Thread(target=fetch)
        thread.start()
        thread.join(120)
        assert not thread.is_alive()
        assert type(caught[0]).__name__ == "Abandoned"


@pytest.mark.slow
def test_killed_again_and_again(
    hub: Any, repo: str, tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    """kill -9 while files come, are read and go: the command line ends in the bytes of the ordinary route."""
    from huggingface_hub import constants

    out = tmp_path / "out"
    command = [sys.executable, "-m", "trapetum", "quantize", repo, "-o", str(out), "--stream-download"]
    command += ["--effort", "fast", "--max-shard-size", "1500000B"]
    environment = {**os.environ, "HF_ENDPOINT": constants.ENDPOINT, "HF_HUB_DISABLE_XET": "1"}
    environment["HF_HOME"] = str(tmp_path / "hf")
    kills, hub.delay = 0, 0.3  # a process that is to be killed must not have ended before this one is told
    for part in (1, 3, 5, 7):
        process = start(*command, env=environment, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        seen = 0
        for line in process.stderr:
            seen += " bpw  " in line
            if seen >= part:
                process.kill()
                kills += 1
                break
        process.stderr.read()
        process.wait(300)
    assert kills == 4
    assert not (out / "trapetum.json").exists()
    hub.delay = 0.0
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=300)
    trapetum.quantize_model(repo, tmp_path / "ordinary", **OPTIONS)
    assert identity(out) == identity(tmp_path / "ordinary")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fp8-block128", {"effort": "fast"}),
        ("bitnet-packed", {"scheme": "asis"}),
        ("aqlm-2x8g8", {"scheme": "asis"}),
    ],
)
def test_packed_models_are_streamed(
    hub: Any, shared: Path, tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    """Scales may lie in another file than their codes: they come by ranges."""
    folder = shared / "models" / "formats" / name
    if not folder.is_dir():
        pytest.skip("that sample is not at hand")
    tensors = safetensors_raw(folder / "model.safetensors")
    halves = {"a": {n: t for i, (n, t) in enumerate(tensors.items()) if i % 2}, "b": {}}
    halves["b"] = {n: t for n, t in tensors.items() if n not in halves["a"]}
    files_of = {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix != ".safetensors"}
    weight_map = {}
    for number, part in enumerate(halves.values(), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        files_of[file] = write_raw(part)
        weight_map |= dict.fromkeys(part, file)
    files_of["model.safetensors.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    hub.commit(REPO, files_of)
    trapetum.quantize_model(REPO, tmp_path / "streamed", stream_download=True, **options)
    trapetum.quantize_model(REPO, tmp_path / "ordinary", **options)
    assert identity(tmp_path / "streamed") == identity(tmp_path / "ordinary")


def safetensors_raw(path: Path) -> dict[str, tuple[dict[str, Any], bytes]]:
    """Entries and bytes of every tensor, of any dtype."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    return {
        n: (e, data[start + e["data_offsets"][0] : start + e["data_offsets"][1]]) for n, e in header.items()
    }


def write_raw(tensors: dict[str, tuple[dict[str, Any], bytes]]) -> bytes:
    """A file of such entries."""
    header, at = {}, 0
    for name, (entry, data) in tensors.items():
        header[name] = {**entry, "data_offsets": [at, at + len(data)]}
        at += len(data)
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + b"".join(data for _, data in tensors.values())
