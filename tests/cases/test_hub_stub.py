"""The stand-in for the Hub that fails in the ways that users report: each way through the command line."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import trapetum

pytestmark = pytest.mark.slow

TOKEN = "hf_secretsecretsecret"


@pytest.fixture
def stub(
    shared: Path, tmp_path: Path, start: Callable[..., subprocess.Popen[bytes]]
) -> Callable[[str], tuple[str, Path]]:
    """Start the stand-in in a mode; its address, and the log of its requests."""

    def serve(mode: str) -> tuple[str, Path]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        log = tmp_path / f"{mode}.log"
        with open(log, "wb") as file:
            script = shared / "cases" / "open_32_hub_stub.py"
            server = start(sys.executable, "-B", script, mode, port, stdout=subprocess.DEVNULL, stderr=file)
        while server.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                time.sleep(0.1)
        return f"http://127.0.0.1:{port}", log

    return serve


@pytest.fixture(scope="module")
def artifact(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stub") / "artifact"
    trapetum.quantize_model(demo_model, out, effort="fast")
    return out


def run(address: str, tmp_path: Path, *arguments: str | Path) -> tuple[list[str], float]:
    """The errors of a command, and the seconds that it took; it must fail with one sentence and without the token."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": address,
        "HF_TOKEN": TOKEN,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(tmp_path / "hf"),
    }
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "trapetum", *map(str, arguments)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 1, done.stderr
    assert len(errors) == 1, done.stderr
    assert "internal error" not in done.stderr
    assert TOKEN not in done.stdout + done.stderr
    return [errors[0], done.stderr], time.monotonic() - begun


SAID = {
    "unauthorized": "token: it is missing, wrong or expired",
    "gated": "the model is gated; its licence must be accepted first",
    "notfound": "(or it is private)",
    "ratelimit": "the Hub asks to slow down",
}


@pytest.mark.parametrize("mode", SAID)
@pytest.mark.parametrize("streamed", [False, True])
def test_download(stub: Callable[[str], tuple[str, Path]], tmp_path: Path, mode: str, streamed: bool) -> None:
    address, log = stub(mode)
    options = ["--stream-download"] if streamed else []
    (error, everything), _ = run(address, tmp_path, "quantize", "acme/tiny", "-o", "out", *options)
    assert SAID[mode] in error
    assert "acme/tiny" in error
    if mode == "gated":
        assert f"{address}/acme/tiny" in everything  # where to accept it
    requests = log.read_text().count("/api/models/acme/tiny")
    assert requests == (4 if mode == "ratelimit" else 1)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("mode", SAID)
def test_push(stub: Callable[[str], tuple[str, Path]], artifact: Path, tmp_path: Path, mode: str) -> None:
    address, log = stub(mode)
    (error, _), _ = run(address, tmp_path, "push", artifact, "acme/tiny")
    assert SAID[mode] in error or (mode == "notfound" and "acme/tiny" in error)
    assert len(re.findall(r" (GET|POST|HEAD|PUT) ", log.read_text())) <= 5


def test_a_commit_that_is_forbidden_is_not_tried_for_ever(
    stub: Callable[[str], tuple[str, Path]], artifact: Path, tmp_path: Path
) -> None:
    address, log = stub("forbidden")
    before = {p.name: p.read_bytes() for p in artifact.iterdir()}
    (error, everything), _ = run(address, tmp_path, "push", artifact, "acme/tiny")
    assert "the Hub denies access" in error
    assert "hint: " in everything
    assert log.read_text().count("/commit/") <= 3
    assert {p.name: p.read_bytes() for p in artifact.iterdir()} == before


def test_a_rate_limit_is_waited_for(stub: Callable[[str], tuple[str, Path]], tmp_path: Path) -> None:
    address, _ = stub("ratelimit")
    (_, everything), seconds = run(address, tmp_path, "quantize", "acme/tiny", "-o", "out")
    assert everything.count("trying again in 2 s") == 3
    assert seconds >= 6


def test_a_flaky_hub_ends_in_a_bound(stub: Callable[[str], tuple[str, Path]], tmp_path: Path) -> None:
    """Every other request fails, and what is asked for is not there: it must end, and soon."""
    address, log = stub("flaky")
    _, seconds = run(address, tmp_path, "quantize", "acme/tiny", "-o", "out")
    assert seconds < 120
    assert len(log.read_text().splitlines()) < 40
