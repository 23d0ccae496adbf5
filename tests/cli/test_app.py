"""The app as a whole: help is cheap, usage errors exit with 2, signals and closed pipes end quietly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from child import measured
from typer.testing import CliRunner

import trapetum
from trapetum.cli.app import COMMANDS, app

# What `trapetum --help` must not load: each costs more than the rest of the command together.
HEAVY = (
    "numpy",
    "numba",
    "scipy",
    "sklearn",
    "huggingface_hub",
    "tokenizers",
    "pydantic",
    "tqdm",
    "jinja2",
    "rich",
)


@pytest.fixture
def spawn(start: Callable[..., subprocess.Popen[str]]) -> Callable[..., subprocess.Popen[str]]:
    """Start ``trapetum ARGUMENTS``."""
    command = (sys.executable, "-m", "trapetum")
    return lambda *arguments, **settings: start(
        *command, *arguments, stderr=subprocess.PIPE, text=True, encoding="utf-8", **settings
    )


def test_help_lists_the_commands() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert result.stderr == ""
    for command in COMMANDS:
        assert f"\n  {command.__name__} " in result.stdout


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\nfrom trapetum.cli import main\nsys.argv = ['trapetum', '--help']\n"
        "try:\n    main()\nexcept SystemExit as e:\n    assert not e.code\n"
        f"sys.exit(','.join(m for m in {HEAVY} if m in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "quantize" in done.stdout


def test_ctrl_c_while_modules_are_loaded() -> None:
    code = (
        "import sys\nfrom trapetum.cli import main\n"
        "class Stop:\n    def find_spec(self, name, *rest):\n"
        "        if name == 'typer':\n            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Stop())\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted\n")


def test_help_is_cheap(cpu_limit: Any) -> None:
    spent = [measured(sys.executable, "-m", "trapetum", "--help").cpu_seconds for _ in range(3)]
    cpu_limit.check(min(spent), 0.6)  # 0.12 s measured; the budget is 0.3


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"trapetum {trapetum.__version__}\n")


def test_no_command_is_a_usage_error() -> None:
    result = CliRunner().invoke(app, [])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Commands:" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["quantise"], "quantize"),
        (["quantize"], "MODEL"),
        (["quantize", "m", "--bist", "4"], "--bits"),
        (["quantize", "m", "--bits", "7"], "2, 3, 4, 5, 6, 8, 1.58"),
        (["quantize", "m", "--bits", "1"], "2, 3, 4, 5, 6, 8, 1.58"),
        (["quantize", "m", "--threads", "0"], "at least 1"),
        (["quantize", "m", "--seed", "-1"], "at least 0"),
        (["quantize", "m", "--max-memory", "lots"], "512M"),
        (["quantize", "m", "--max-shard-size", "0"], "at least 1 byte"),
        (["quantize", "m", "--effort", "max"], "fast, default, high"),
        (["quantize", "m", "--scheme", "magic"], "kmeans"),
        (["quantize", "m", "--export", "onnx"], "cbk"),
        (["quantize", "m", "extra"], "extra"),
        (["export", "a", "--format", "onnx"], "cbk"),
        (["export", "a", "--format", "hf", "--dtype", "int8"], "f32, bf16, f16"),
        (["export", "a"], "--format"),
        (["run", "m"], "--prompt"),
        (["run", "m", "--prompt", "x", "-n", "0"], "at least 1"),
        (["run", "m", "--prompt", "x", "--temperature", "-1"], "at least 0"),
        (["run", "m", "--prompt", "x", "--temperature", "nan"], "at least 0"),
        (["run", "m", "--prompt", "x", "--top-p", "0"], "above 0 and at most 1"),
        (["run", "m", "--prompt", "x", "--top-k", "0"], "at least 1"),
        (["run", "m", "--prompt", "x", "--device", "tpu"], "cpu"),
        (["perplexity", "m"], "--text"),
        (["perplexity", "m", "--text", "/nowhere/t.txt"], "/nowhere/t.txt"),
        (["perplexity", "m", "--text", __file__, "--ctx", "1"], "at least 2"),
        (["perplexity", "m", "--text", __file__, "--score", "half"], "all, second-half"),
        (["compare", "a", "--text", __file__], "B"),
    ],
)
def test_usage_errors(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, arguments)
    error, hint = result.stderr.splitlines()
    assert (result.exit_code, result.stdout) == (2, "")
    assert error.startswith("error: ")
    assert words in error
    assert hint.startswith("hint: see `")


@pytest.mark.parametrize(
    "command", ["quantize", "export", "verify", "inspect", "run", "perplexity", "compare"]
)
def test_a_missing_input_is_named(command: str, tmp_path: Path) -> None:
    missing = str(tmp_path / "nowhere")
    extra = {
        "quantize": ["-o", str(tmp_path / "out")],
        "export": ["--format", "hf", "-o", str(tmp_path / "out")],
        "run": ["--prompt", "x"],
        "perplexity": ["--text", __file__],
        "compare": [missing, "--text", __file__],
    }.get(command, [])
    result = CliRunner().invoke(app, [command, missing, *extra])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: ")
    assert missing in result.stderr
    assert "internal error" not in result.stderr
    assert not (tmp_path / "out").exists()


def _open_once_read(fifo: Path) -> int:
    """Descriptor of the writing end, as soon as another process reads; ``OSError`` if none does within five."""
    end = time.monotonic() + 300
    while True:
        try:
            return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # ENXIO: nobody reads yet
            if time.monotonic() > end:
                raise
            time.sleep(0.01)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals(
    number: signal.Signals, code: int, tmp_path: Path, spawn: Callable[..., subprocess.Popen[str]]
) -> None:
    fifo = tmp_path / "text"
    os.mkfifo(fifo)
    process = spawn("perplexity", str(tmp_path), "--text", str(fifo), stdout=subprocess.PIPE)
    writing = _open_once_read(fifo)  # the command now waits for text
    try:
        process.send_signal(number)
        out, err = process.communicate(timeout=300)
    finally:
        os.close(writing)
    assert process.returncode == code
    assert out == ""
    assert err in ("error: interrupted\n", "error: terminated by SIGTERM\n")


def test_a_closed_pipe_is_quiet(spawn: Callable[..., subprocess.Popen[str]]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = spawn("recipes", stdout=writing)
    os.close(writing)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert err == ""


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_a_closed_stream_is_not_the_next_file(
    closed: tuple[int, ...], demo_model: Path, tmp_path: Path
) -> None:
    """Else the first file that is opened would get the stream's number, and with it what is printed."""
    redirects = " ".join(f"{fd}{'<' if fd == 0 else '>'}&-" for fd in closed)
    script = f'exec "$0" -m trapetum inspect "$1" {redirects}'
    command = ["sh", "-c", script, sys.executable, str(demo_model)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert ("model.norm.weight" in done.stdout) == (1 not in closed)
