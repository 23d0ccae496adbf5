"""Each command end to end on the demo model: what it prints, where, and with which exit code."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from trapetum.cli.app import app


def _run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def _json(*arguments: str | Path) -> Any:
    result = _run(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cli")


@pytest.fixture(scope="module")
def artifact(folder: Path, demo_model: Path) -> Path:
    result = _run("quantize", demo_model, "-o", folder / "a")
    assert result.exit_code == 0, result.stderr
    assert f"wrote {folder / 'a'}: " in result.stdout
    return folder / "a"


@pytest.fixture(scope="module")
def text(folder: Path, demo_text: Path) -> Path:
    path = folder / "text.txt"
    path.write_bytes(demo_text.read_bytes()[:6000])
    return path


@pytest.fixture(scope="module")
def broken(folder: Path, artifact: Path) -> Path:
    """The artifact with one byte of its weights changed."""
    copy = folder / "broken"
    shutil.copytree(artifact, copy)
    (file,) = copy.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1000] ^= 0x10
    file.write_bytes(data)
    return copy


def test_a_dry_run_predicts_what_is_written(artifact: Path, demo_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shown = _run("quantize", demo_model, "-o", out, "--dry-run")
    assert shown.exit_code == 0
    assert re.search(r"^model\.norm\.weight +norm +keep +256 +512 +16\.000$", shown.stdout, re.MULTILINE)
    assert "would write" in shown.stdout
    assert "MiB of memory" in shown.stdout
    assert not out.exists()
    plan = _json("quantize", demo_model, "-o", out, "--dry-run")
    assert plan["files"] == {p.name: p.stat().st_size for p in artifact.glob("*.safetensors")}
    assert {"name", "role", "scheme", "bytes", "bpw"} <= plan["tensors"][0].keys()


def test_quantize_logs_a_line_a_tensor(artifact: Path, demo_model: Path, tmp_path: Path) -> None:
    result = _run("quantize", demo_model, "-o", tmp_path / "b", "--threads", "1")
    lines = result.stderr.splitlines()
    assert "\r" not in result.stderr
    assert sum(line.startswith("model.layers.1.mlp.up_proj.weight ") for line in lines) == 1
    one = (tmp_path / "b" / "SHA256SUMS").read_bytes()
    assert one == (artifact / "SHA256SUMS").read_bytes()  # one thread or all: the same bytes


def test_quantize_refuses_a_finished_output(artifact: Path, demo_model: Path) -> None:
    before = {p.name: p.stat().st_mtime_ns for p in artifact.iterdir()}
    result = _run("quantize", demo_model, "-o", artifact)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "already holds a finished artifact" in result.stderr
    assert "--overwrite" in result.stderr
    assert {p.name: p.stat().st_mtime_ns for p in artifact.iterdir()} == before


def test_quantize_refuses_its_input(demo_model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "m"
    shutil.copytree(demo_model, copy)
    result = _run("quantize", copy, "-o", copy, "--overwrite")
    assert result.exit_code == 1
    assert (copy / "model.safetensors").read_bytes() == (demo_model / "model.safetensors").read_bytes()


def test_quantize_can_export_at_once(demo_model: Path, tmp_path: Path) -> None:
    data = _json(
        "quantize", demo_model, "-o", tmp_path / "a", "--bits", "8", "--export", "hf", "--drop-artifact"
    )
    assert data["export"]["path"] == str(tmp_path / "a-hf")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a-hf"]
    assert _json("inspect", tmp_path / "a-hf")["types"].keys() == {"float32"}


@pytest.mark.parametrize("format", ["cbk", "gguf", "planes"])
def test_every_format_can_follow_at_once(format: str, demo_model: Path, tmp_path: Path) -> None:
    options = ("--scheme", "ternary", "--export", format, "--drop-artifact")
    data = _json("quantize", demo_model, "-o", tmp_path / "a", *options)
    assert data["export"]["path"] == str(tmp_path / f"a-{format}")
    assert data["export"]["size"] > 0
    assert [p.name for p in tmp_path.iterdir()] == [f"a-{format}"]


def test_an_export_that_cannot_be_is_refused_before_the_work(demo_model: Path, tmp_path: Path) -> None:
    (tmp_path / "a-cbk").mkdir()
    (tmp_path / "a-cbk" / "mine.txt").write_text("precious", "utf-8")
    result = _run("quantize", demo_model, "-o", tmp_path / "a", "--export", "cbk", "--overwrite")
    assert result.exit_code == 1
    assert "a-cbk: holds mine.txt" in result.stderr
    assert not (tmp_path / "a").exists()


def test_dropping_needs_an_export(demo_model: Path) -> None:
    result = _run("quantize", demo_model, "--drop-artifact")
    assert result.exit_code == 2
    assert "--export" in result.stderr


def test_a_fraction_of_bits_is_a_budget(demo_model: Path, tmp_path: Path) -> None:
    by_bits, by_budget = (
        _json("quantize", demo_model, "-o", tmp_path / "a", "--dry-run", option, "3.5", "--effort", "fast")
        for option in ("--bits", "--target-bpw")
    )
    assert by_bits["recipe"] == by_budget["recipe"]
    assert by_bits["tensors"] == by_budget["tensors"]
    assert 3.4 < by_bits["quantized_bpw"] <= 3.5


@pytest.mark.parametrize("bits", ["7", "1.5", "8.5", "nan", "four"])
def test_other_bits_are_a_usage_error(bits: str, demo_model: Path, tmp_path: Path) -> None:
    result = _run("quantize", demo_model, "-o", tmp_path / "a", "--bits", bits)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"'{bits}'" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["out.cbk", "out"])
def test_export_cbk(name: str, artifact: Path, tmp_path: Path) -> None:
    out = tmp_path / name
    plan = _json("export", artifact, "--format", "cbk", "-o", out, "--dry-run")
    assert list(tmp_path.iterdir()) == []
    assert _run("export", artifact, "--format", "cbk", "-o", out).exit_code == 0
    file = out / "model.cbk" if out.is_dir() else out
    assert file.stat().st_size == plan["size"]
    found = _json("inspect", file)
    assert (found["kind"], found["metadata"]["magic"]) == ("cbk", "CBK3")
    again = _run("export", artifact, "--format", "cbk", "-o", out)
    assert again.exit_code == 1
    assert "--overwrite" in again.stderr


def test_perplexity(artifact: Path, text: Path) -> None:
    data = _json("perplexity", artifact, "--text", text, "--ctx", "128")
    assert data.keys() == {"tokens", "nll", "ppl", "ctx", "score"}
    assert (data["ctx"], data["score"]) == (128, "all")
    assert 20 < data["ppl"] < 80
    half = _json("perplexity", artifact, "--text", text, "--ctx", "128", "--score", "second-half")
    assert half["tokens"] < data["tokens"]


def test_compare_with_itself_is_zero(artifact: Path, text: Path) -> None:
    data = _json("compare", artifact, artifact, "--text", text, "--ctx", "128")
    keys = ("kl_mean", "kl_max", "tv_mean", "tv_max", "argmax_changes")
    assert [data[k] for k in keys] == [0, 0, 0, 0, 0]
    assert data["top1_agreement"] == 1
    shown = _run("compare", artifact, artifact, "--text", text, "--ctx", "128")
    assert "KL(A||B)         0 nats in the mean" in shown.stdout


def test_text_that_is_not_utf8_is_refused(artifact: Path, tmp_path: Path) -> None:
    path = tmp_path / "latin1.txt"
    path.write_bytes("é".encode("latin1"))
    result = _run("perplexity", artifact, "--text", path)
    assert result.exit_code == 1
    assert "latin1.txt: byte 0 is 0xe9" in result.stderr


def test_verify(artifact: Path, broken: Path, demo_model: Path, text: Path) -> None:
    result = _run("verify", artifact, "--source", demo_model, "--text", text, "--ctx", "128")
    assert result.exit_code == 0, result.stdout + result.stderr
    for check in ("integrity", "decoder", "reconstruction", "logits"):
        assert re.search(rf"^{check} +ok ", result.stdout, re.MULTILINE)
    wrong = CliRunner().invoke(app, ["verify", str(broken), "--json"])
    assert wrong.exit_code == 3
    report = json.loads(wrong.stdout)
    assert report["ok"] is False
    assert "SHA-256" in report["checks"][0]["detail"]


def test_inspect_an_artifact(artifact: Path) -> None:
    data = _json("inspect", artifact)
    assert data["kind"] == "artifact"
    assert data["metadata"]["recipe"]["bits"] == 4
    assert data["totals"]["weights"] == 2_492_160
    assert data["totals"]["bytes"] == sum(t["bytes"] for t in data["tensors"])
    assert data["types"]["codebook size=16"]["tensors"] == 21
    assert "rel. error" in _run("inspect", artifact).stdout


def test_inspect_one_file_without_config(demo_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    shutil.copy(demo_model / "model.safetensors", file)
    data = _json("inspect", file)
    assert data["metadata"] == {"header": {"model.safetensors": {"format": "pt"}}}
    assert data["totals"] == {"tensors": 29, "weights": 2_492_160, "bytes": 4_984_320, "bpw": 16.0}
    shown = _run("inspect", file).stdout
    assert re.search(r"^model\.norm\.weight +bfloat16 +256 +512 +16\.000$", shown, re.MULTILINE)


def test_run_streams_text(artifact: Path) -> None:
    result = _run("run", artifact, "--prompt", "The old house stood", "-n", "8")
    assert result.exit_code == 0
    assert len(result.stdout.split()) >= 4
    assert re.fullmatch(
        r"\d+ prompt tokens, 8 new tokens, first after .* s, then .* tokens/s\n", result.stderr
    )
    assert _run("run", artifact, "--prompt", "The old house stood", "-n", "8").stdout == result.stdout
    word = result.stdout.split()[2]
    cut = _run("run", artifact, "--prompt", "The old house stood", "-n", "8", "--stop", word)
    assert cut.stdout == result.stdout.split(word)[0] + "\n"


def test_what_does_not_fit_is_said_in_the_words_of_the_command(artifact: Path, text: Path) -> None:
    for command, words, hint in (
        (
            ("run", "--prompt", "a b", "-n", "600"),
            "do not fit in the model's context of 512",
            "fewer new tokens",
        ),
        (("run", "--prompt", ""), "the prompt has no token", "--prompt"),
        (("perplexity", "--text", text, "--ctx", "600"), "context of 512", "Give --ctx 512, or less."),
    ):
        result = _run(*command, artifact)
        assert (result.exit_code, result.stdout) == (1, "")
        said, advice = result.stderr.splitlines()[-2:]
        assert words in said
        assert hint in advice
        assert command[0] == "perplexity" or "--ctx" not in advice


def test_run_without_a_chat_template(artifact: Path) -> None:
    result = _run("run", artifact, "--prompt", "Hello", "--chat")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "chat template" in result.stderr


def test_the_locale_changes_nothing(artifact: Path, tmp_path: Path) -> None:
    path = tmp_path / "modèle"
    shutil.copytree(artifact, path)
    outputs = []
    for locale in ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {"LC_ALL": "C.UTF-8"}):
        command = [sys.executable, "-m", "trapetum", "run", str(path), "--prompt", "café — naïve", "-n", "4"]
        environment = {**os.environ, **locale}
        done = subprocess.run(command, env=environment, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]


def test_recipes() -> None:
    assert _json("recipes").keys() >= {"3bit", "4bit", "4bit-head8", "8bit"}
    assert re.search(r"^4bit +\S", _run("recipes").stdout, re.MULTILINE)


def test_env() -> None:
    data = _json("env")
    assert data["packages"]["numpy"]
    assert data["cpu"]["usable"] >= 1
    assert data["memory"]["total"] is None or data["memory"]["total"] > 2**20
    shown = _run("env").stdout
    for word in ("python", "cpu", "memory", "blas", "numba", "kernels cache"):
        assert re.search(rf"^{word} +\S", shown, re.MULTILINE)


# The command line, with a signal to itself when the third tensor is done.
_STOPPED = """
import os, signal, sys
import trapetum.cli.quantize as command
from trapetum.cli import main
from trapetum.cli.progress import LogProgress

class Stops(LogProgress):
    def advance(self, amount, line=None):
        super().advance(amount, line)
        if line and line.startswith("model.layers.0.mlp.down_proj.weight "):
            os.kill(os.getpid(), number)

command.terminal_progress = Stops
number = int(sys.argv.pop())  # typer must not see it
main()
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_a_stopped_job_can_be_inspected_and_goes_on(
    number: signal.Signals, code: int, artifact: Path, demo_model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    arguments = ["quantize", str(demo_model), "-o", str(out), str(int(number))]
    done = subprocess.run(
        [sys.executable, "-c", _STOPPED, *arguments], capture_output=True, text=True, check=False, timeout=300
    )
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    data = _json("inspect", out)
    assert data["kind"] == "unfinished job"
    assert any("run the same `trapetum quantize` command" in note for note in data["notes"])
    assert [t["name"] for t in data["tensors"]] == [
        "model.embed_tokens.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.mlp.down_proj.weight",
    ]
    parts = sorted((out / ".trapetum" / "parts").glob("*.safetensors"))
    parts[0].write_bytes(b"")  # a faulty part is a note, not a failure
    assert any("will be made again" in note for note in _json("inspect", out)["notes"])
    resumed = _json("quantize", demo_model, "-o", out)
    assert resumed["resumed"] == 2
    assert (out / "SHA256SUMS").read_bytes() == (artifact / "SHA256SUMS").read_bytes()


@pytest.mark.parametrize(
    ("command", "idle"),
    [
        ("run MODEL --prompt Hi", "--top-k 3"),
        ("run MODEL --prompt Hi --temperature 0", "--seed 1"),
        ("run MODEL --prompt Hi", "--experts cpu"),
        ("run MODEL --prompt Hi --device cuda", "--precision exact"),
        ("run MODEL --prompt Hi --device cuda", "--cache-type f32"),
        ("perplexity MODEL --text TEXT", "--experts card"),
        ("compare MODEL MODEL --text TEXT", "--experts cpu"),
        ("verify MODEL --source MODEL --text TEXT", "--experts cpu"),
        ("verify MODEL --device cuda --source MODEL", "--experts cpu"),
        ("verify MODEL --source MODEL", "--ctx 64"),
        ("verify MODEL", "--text TEXT"),
        ("verify MODEL", "--revision main"),
        ("verify MODEL", "--token T"),
        ("bench --device cuda", "--model MODEL"),
        ("bench --device cuda", "--cpu-time"),
        ("quantize MODEL --export cbk --drop-artifact", "--max-shard-size 1M"),
        ("quantize MODEL --export planes --drop-artifact", "--max-shard-size 5G"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(
    command: str, idle: str, demo_model: Path, text: Path
) -> None:
    paths = {"MODEL": demo_model, "TEXT": text}
    result = _run(*(paths.get(word, word) for word in f"{command} {idle}".split()))
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"{idle.split()[0]} goes with " in result.stderr


@pytest.mark.parametrize(
    "command",
    [
        "run MODEL --prompt Hi",
        "perplexity MODEL --text TEXT",
        "compare MODEL MODEL --text TEXT",
        "verify MODEL --source MODEL --text TEXT",
    ],
)
def test_without_a_card_nothing_runs_on_the_cpu_instead(
    command: str, demo_model: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)  # as if it were not installed
    paths = {"MODEL": demo_model, "TEXT": text}
    result = _run(*(paths.get(word, word) for word in f"{command} --device cuda".split()))
    assert (result.exit_code, result.stdout) == (1, "")
    assert "error: CUDA kernels need CuPy" in result.stderr


@pytest.mark.parametrize("hessian", [(), ("--hessian",)])
def test_imatrix_replaces_nothing_but_importance_files(
    hessian: tuple[str, ...], demo_model: Path, text: Path, tmp_path: Path
) -> None:
    weights, made = tmp_path / "model.safetensors", tmp_path / "importance"
    shutil.copy(demo_model / "model.safetensors", weights)
    order = ("imatrix", demo_model, "--text", text, *hessian, "--tokens", "64", "-o")
    for out, options, words in (
        (weights, (), "--overwrite"),
        (weights, ("--overwrite",), "no importance file"),
        (text, ("--overwrite",), "no importance file"),
    ):
        before = out.read_bytes()
        result = _run(*order, out, *options)
        assert (result.exit_code, result.stdout) == (1, "")
        assert words in result.stderr
        assert out.read_bytes() == before
    result = _run(*order, made)
    assert result.exit_code == 0
    assert (
        "calibrating on 64 tokens" in result.stderr
    )  # no more than was asked for, though a window holds 512
    first = made.read_bytes()
    assert _run(*order, made, "--overwrite").exit_code == 0
    assert made.read_bytes() == first


@pytest.mark.parametrize("format", ["cbk", "planes"])
def test_an_export_is_not_quantized_again(format: str, artifact: Path, tmp_path: Path) -> None:
    assert _run("export", artifact, "--format", format, "-o", tmp_path / format).exit_code == 0
    result = _run("quantize", tmp_path / format, "-o", tmp_path / "again")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "quantized already" in result.stderr
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("split", [(), ("--max-shard-size", "1M")])
def test_a_folder_that_holds_one_gguf_is_that_model(
    split: tuple[str, ...], demo_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "g"
    assert _run("export", demo_model, "--format", "gguf", "-o", folder, *split).exit_code == 0
    first, *others = sorted(folder.glob("*.gguf"))
    assert bool(others) == bool(split)
    assert _json("inspect", folder) == {**_json("inspect", first), "path": str(folder)}
    assert _run("verify", folder, "--source", demo_model).exit_code == 0
    assert _run("quantize", folder, "-o", tmp_path / "a", "--dry-run").exit_code == 0
    shutil.copy(first, folder / "other.gguf")  # two models: which one is meant must be said
    result = _run("verify", folder)
    assert result.exit_code == 3
    result = _run("inspect", folder)
    assert result.exit_code == 1
    assert f"hint: Name the file itself: {first}" in result.stderr


def test_verify_says_what_the_source_of_a_turned_export_is(demo_model: Path, tmp_path: Path) -> None:
    assert _run("quantize", demo_model, "-o", tmp_path / "a", "--rotate", "residual").exit_code == 0
    assert _run("export", tmp_path / "a", "--format", "hf", "-o", tmp_path / "hf").exit_code == 0
    wrong = _run("verify", tmp_path / "hf", "--source", demo_model)
    assert wrong.exit_code == 3
    assert "--rotate residual has that artifact as its source" in wrong.stdout
    right = _run("verify", tmp_path / "hf", "--source", tmp_path / "a")
    assert right.exit_code == 0, right.stdout
