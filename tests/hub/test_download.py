"""A Hub id as MODEL: revision, cache, offline, a cut-off download, waits; the commit in the artifact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from trapetum.cli.app import app
from trapetum.errors import CheckpointError
from trapetum.hub import resolve_model
from trapetum.hub_errors import TRIES
from trapetum.quantize.job import quantize_model

TOKEN = "hf_secretsecretsecret"
REPO = "acme/books"


@pytest.fixture
def commits(hub: Any, demo_model: Path) -> tuple[str, str]:
    """Two commits of the demo model; the first has another card, and files that are never fetched."""
    files = {p.name: p.read_bytes() for p in demo_model.iterdir() if p.is_file()}
    card = b"---\nlicense: apache-2.0\n---\n"
    extra = {"pytorch_model.bin": b"pickle", "modeling.py": b"raise SystemExit", "onnx/x.json": b"{}"}
    first = hub.commit(REPO, {**files, **extra, "README.md": card, "LICENSE": b"Apache"})
    second = hub.commit(REPO, {**files, "README.md": card.replace(b"apache-2.0", b"mit")})
    return first, second


def test_revision_and_commit(hub: Any, commits: tuple[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    quantize_model(REPO, out, revision=commits[0], effort="fast", bits=3)
    source = json.loads((out / "trapetum.json").read_bytes())["source"]
    assert (source["repo"], source["commit"], source["name"]) == (REPO, commits[0], "books")
    card = (out / "README.md").read_text()
    assert 'license: "apache-2.0"' in card
    assert f'base_model: "{REPO}"\nbase_model_relation: "quantized"' in card
    assert (out / "LICENSE").read_bytes() == b"Apache"
    for name in ("pytorch_model", r"modeling\.py", "onnx"):
        assert hub.asked(f"resolve/.*{name}") == 0
    assert resolve_model(REPO).name == commits[1]


def test_every_command_that_takes_an_id_takes_its_revision(
    hub: Any, commits: tuple[str, str], demo_text: Path, tmp_path: Path
) -> None:
    hub.token = TOKEN
    text = tmp_path / "text.txt"
    text.write_text(demo_text.read_text(encoding="utf-8")[:3000], encoding="utf-8")
    out, options = tmp_path / "out", ("--revision", commits[0], "--token", TOKEN)
    for command in (
        ("quantize", REPO, "-o", out, "--effort", "fast"),
        ("verify", out, "--source", REPO),
        ("compare", REPO, out, "--text", text, "--ctx", "64"),
        ("imatrix", REPO, "--text", text, "--tokens", "64", "-o", tmp_path / "im"),
    ):
        line = [str(word) for word in (*command, *options)]
        wrong = CliRunner().invoke(app, [word.replace(commits[0], "v9") for word in line])
        assert wrong.exit_code == 1
        assert f"{REPO} (revision v9): the Hub's model has no such revision" in wrong.stderr
        result = CliRunner().invoke(app, line)
        assert result.exit_code == 0, result.stderr
        assert TOKEN not in wrong.output + result.output
    assert hub.asked(f"/api/models/{REPO}$") == 0  # nobody asked for the main branch
    for path in (p for p in tmp_path.rglob("*") if p.is_file()):
        assert TOKEN.encode() not in path.read_bytes(), path


def test_the_cache_serves_again_and_offline(
    hub: Any, commits: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = resolve_model(REPO)
    fetched = hub.asked("GET /acme")
    assert resolve_model(REPO) == path
    assert hub.asked("GET /acme") == fetched
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    before = len(hub.requests)
    assert resolve_model(REPO) == path
    assert resolve_model(REPO, revision=commits[1]) == path
    with pytest.raises(CheckpointError, match="the Hub cannot be reached"):
        resolve_model("acme/unknown")
    assert len(hub.requests) == before


def test_a_cut_off_download_goes_on(
    hub: Any, commits: tuple[str, str], demo_model: Path, waits: list[float]
) -> None:
    hub.fault("safetensors", 200, times=1, cut=True)
    path = resolve_model(REPO)
    assert (path / "model.safetensors").read_bytes() == (demo_model / "model.safetensors").read_bytes()


def test_the_token_is_sent_and_not_shown(hub: Any, commits: tuple[str, str]) -> None:
    hub.token = TOKEN
    with pytest.raises(CheckpointError, match="refuses the token") as caught:
        resolve_model(REPO, token="hf_expired")
    assert "hf_expired" not in f"{caught.value.message} {caught.value.hint}"
    assert resolve_model(REPO, token=TOKEN).name == commits[1]
    assert all(sent for _, _, sent in hub.requests)


@pytest.mark.parametrize(
    ("status", "headers", "message", "tries"),
    [
        (403, {"X-Error-Code": "GatedRepo"}, "licence must be accepted", 1),
        (403, {}, "denies access", 1),
        (404, {"X-Error-Code": "RepoNotFound"}, "neither a local path nor a model on the Hub", 1),
        (401, {"X-Error-Code": "RepoNotFound"}, "refuses the token", 1),
        (429, {"Retry-After": "2"}, "asks to slow down", TRIES),
        (503, {}, "HTTP status 503", TRIES),
    ],
)
def test_refusals(
    hub: Any, waits: list[float], status: int, headers: dict[str, str], message: str, tries: int
) -> None:
    hub.fault("GET /api/models", status, headers=headers)
    with pytest.raises(CheckpointError, match=message):
        resolve_model(REPO)
    assert hub.asked("GET /api/models") == tries
    assert waits == ([] if tries == 1 else [2.0] * 3 if headers else [1.0, 2.0, 4.0])


def test_a_pause_is_waited_out(hub: Any, commits: tuple[str, str], waits: list[float]) -> None:
    hub.fault("GET /api/models", 429, times=2, headers={"Retry-After": "5"})
    assert resolve_model(REPO).name == commits[1]
    assert waits == [5.0, 5.0]


def test_no_such_revision(hub: Any, commits: tuple[str, str]) -> None:
    with pytest.raises(CheckpointError, match="no such revision"):
        resolve_model(REPO, revision="v9")
