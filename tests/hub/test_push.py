"""push: what is sent, what the card says, what is never sent, and each way the Hub may refuse."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from trapetum.cli.app import app
from trapetum.errors import FormatError, OutputError, RecipeError
from trapetum.hub_errors import TRIES
from trapetum.push import push_artifact
from trapetum.quantize.job import quantize_model

# The client uploads large files in a way that its own HTTP library announces to drop.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content:DeprecationWarning")

TOKEN = "hf_secretsecretsecret"
REPO = "acme/tiny"


@pytest.fixture(scope="module")
def made(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact of a model with a card and a licence, in two shards."""
    folder = tmp_path_factory.mktemp("push")
    model = Path(shutil.copytree(demo_model, folder / "model"))
    (model / "README.md").write_text("---\nlicense: apache-2.0\nlanguage:\n- en\n---\n# Books\n")
    quantize_model(model, folder / "out", effort="fast", bits=3, max_shard_size=1_500_000)
    return folder / "out"


@pytest.fixture
def artifact(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "artifact"))


def expected(folder: Path) -> dict[str, bytes]:
    """Files that must arrive as they are."""
    changed = ("README.md", "SHA256SUMS", "run.jsonl")
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name not in changed}


def test_push_and_push_again(hub: Any, artifact: Path) -> None:
    hub.token = TOKEN
    report = push_artifact(artifact, REPO, token=TOKEN, base_model="org/books")
    files = hub.files(REPO)
    assert {n: files[n] for n in expected(artifact)} == expected(artifact)
    assert "run.jsonl" not in files
    assert report.commit == hub.heads[REPO]
    assert (report.url or "").endswith(f"/{REPO}/commit/{report.commit}")
    assert hub.visibility[REPO] is None
    for line in files["SHA256SUMS"].decode().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256(files[name]).hexdigest() == digest
    uploads = list(hub.uploads)
    assert len(uploads) >= 3  # two shards and the tokenizer

    again = push_artifact(artifact, REPO, token=TOKEN, base_model="org/books")
    assert hub.uploads == uploads
    assert again.commit == report.commit  # nothing changed: no empty commit


def test_the_card(hub: Any, artifact: Path, tmp_path: Path) -> None:
    result = tmp_path / "compare.json"
    result.write_text(json.dumps({"kl_mean": 0.0123456789, "top1_agreement": 0.9, "tokens": 5000}))
    push_artifact(artifact, REPO, base_model="org/books", quality=[result])
    card = hub.files(REPO)["README.md"].decode()
    _, head, body = card.split("---\n", 2)
    lines = head.splitlines()
    for line in (
        'library_name: "trapetum"',
        'license: "apache-2.0"',
        'base_model: "org/books"',
        'base_model_relation: "quantized"',
        'tags: ["trapetum", "quantized"]',
    ):
        assert lines.count(line) == 1
    assert "trapetum quantize org/books --recipe 3bit --effort fast\n" in body
    assert "| KL divergence, mean (nats) | 0.012346 |" in body
    assert "| tokens | 5,000 |" in body
    yaml = pytest.importorskip("yaml")
    assert yaml.safe_load(head)["language"] == ["en"]


def test_the_command_of_the_card_makes_the_artifact_again(
    artifact: Path, demo_model: Path, tmp_path: Path
) -> None:
    report = push_artifact(artifact, REPO, base_model="org/books", dry_run=True)
    command = next(line for line in report.card.splitlines() if line.startswith("trapetum quantize"))
    model = artifact.parent / "model"
    shutil.copytree(demo_model, model)
    words = [str(model) if word == "org/books" else word for word in command.split()[1:]]
    options = ["-o", str(tmp_path / "again"), "--max-shard-size", "1500000B"]
    result = CliRunner().invoke(app, [*words, *options])
    assert result.exit_code == 0
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (artifact / name).read_bytes()


def test_a_dry_run_asks_nothing(hub: Any, artifact: Path) -> None:
    result = CliRunner().invoke(app, ["push", str(artifact), REPO, "--dry-run", "--json", "--token", TOKEN])
    data = json.loads(result.stdout)
    assert hub.requests == []
    assert data["files"].keys() == {*expected(artifact), "README.md", "SHA256SUMS"}
    assert all(data["files"][n] == len(b) for n, b in expected(artifact).items())
    assert TOKEN not in result.output
    text = CliRunner().invoke(app, ["push", str(artifact), REPO, "--dry-run"]).stdout
    assert "would push" in text


def test_private_and_pull_request(hub: Any, artifact: Path) -> None:
    push_artifact(artifact, REPO, private=True)
    assert hub.visibility[REPO] == "private"
    push_artifact(artifact, REPO, private=True)  # again: it is private
    hub.commit("org/other", {".gitattributes": b""})
    report = push_artifact(artifact, "org/other", create_pr=True)
    assert hub.pull_requests == 1
    assert (report.url or "").endswith("/org/other/discussions/1")
    assert list(hub.files("org/other")) == [".gitattributes"]  # main is untouched
    assert expected(artifact).keys() <= hub.commits["org/other"][report.commit].keys()


def test_private_is_never_public(hub: Any, artifact: Path) -> None:
    """The Hub keeps a repository as it is, and says nothing."""
    hub.commit(REPO, {".gitattributes": b""})
    with pytest.raises(OutputError, match=f"{REPO}: is there already, and public"):
        push_artifact(artifact, REPO, private=True)
    assert (hub.uploads, list(hub.files(REPO))) == ([], [".gitattributes"])
    result = CliRunner().invoke(app, ["push", str(artifact), REPO, "--private", "--create-pr"])
    assert result.exit_code == 2
    assert "--private and --create-pr" in result.stderr
    with pytest.raises(RecipeError, match="exclude each other"):
        push_artifact(artifact, REPO, private=True, create_pr=True)


def test_what_is_there_already(hub: Any, artifact: Path) -> None:
    hub.commit("acme/mine", {"README.md": b"---\nlicense: mit\n---\nWritten by hand\n"})
    report = push_artifact(artifact, "acme/mine")
    files = hub.files("acme/mine")
    assert files["README.md"].endswith(b"Written by hand\n")
    assert "README.md" not in files["SHA256SUMS"].decode()
    assert "keeps its own README.md" in report.notes[0]

    hub.commit("acme/old", {"trapetum.json": b"{}", "model-00003-of-00003.safetensors": b"old"})
    assert push_artifact(artifact, "acme/old").removed == ("model-00003-of-00003.safetensors",)
    assert "model-00003-of-00003.safetensors" not in hub.files("acme/old")

    hub.commit("acme/foreign", {"model.safetensors": b"another's"})
    with pytest.raises(OutputError, match="holds other weights"):
        push_artifact(artifact, "acme/foreign")
    assert hub.uploads.count(hashlib.sha256(b"another's").hexdigest()) == 0


@pytest.mark.parametrize(
    ("pattern", "status", "headers", "message", "requests"),
    [
        ("", 401, {}, "refuses the token: it is missing, wrong or expired", 2),  # does it exist, then?
        ("repos/create", 403, {}, "denies access", 1),
        ("/commit/", 403, {}, "denies access", 1),
        ("/commit/", 403, {"X-Error-Code": "GatedRepo"}, "licence must be accepted", 1),
        ("/commit/", 413, {}, "takes no file of this size", 1),
        ("/commit/", 507, {}, "storage on the Hub is used up", 1),
        ("GET /api/models", 404, {"X-Error-Code": "RepoNotFound"}, "not a model on the Hub", 1),
        ("/commit/", 429, {"Retry-After": "7"}, "asks to slow down", TRIES),
        ("/commit/", 429, {"Retry-After": "3600"}, "asks to slow down", 1),
        ("/commit/", 503, {}, "HTTP status 503", TRIES),
    ],
)
def test_refusals(
    hub: Any,
    artifact: Path,
    waits: list[float],
    pattern: str,
    status: int,
    headers: dict[str, str],
    message: str,
    requests: int,
) -> None:
    hub.fault(pattern, status, headers=headers)
    result = CliRunner().invoke(app, ["push", str(artifact), REPO, "--token", TOKEN])
    assert result.exit_code == 1
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert REPO in errors[0]
    assert message in errors[0]
    assert TOKEN not in result.output
    assert hub.asked(pattern) == requests
    if requests == TRIES:
        assert waits == ([7.0] * 3 if headers else [1.0, 2.0, 4.0])


@pytest.mark.parametrize("where", ["/preupload/", "/objects/", "/commit/", "objects/batch", "repos/create"])
def test_a_passing_failure_is_survived(hub: Any, artifact: Path, waits: list[float], where: str) -> None:
    hub.fault(where, 503, times=2)
    push_artifact(artifact, REPO)
    assert expected(artifact).items() <= hub.files(REPO).items()
    assert waits
    assert len(hub.uploads) == len(set(hub.uploads))


def test_a_pull_request_is_not_opened_twice(hub: Any, artifact: Path, waits: list[float]) -> None:
    hub.commit(REPO, {".gitattributes": b""})
    hub.fault("/commit/", 503, times=1)
    with pytest.raises(OutputError, match="503"):
        push_artifact(artifact, REPO, create_pr=True)
    assert hub.asked("/commit/") == 1


def test_a_push_that_was_cut_off_sends_the_rest(hub: Any, artifact: Path, waits: list[float]) -> None:
    hub.fault("/commit/", 503)
    with pytest.raises(OutputError):
        push_artifact(artifact, REPO)
    sent = list(hub.uploads)
    assert sent
    hub.faults.clear()
    push_artifact(artifact, REPO)
    assert hub.uploads == sent


def test_what_arrived_is_compared(hub: Any, artifact: Path) -> None:
    hub.garble = True
    with pytest.raises(OutputError, match=r"after the push model-\S+ has sha256"):
        push_artifact(artifact, REPO)


def test_what_is_not_pushed(
    hub: Any, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FormatError):
        push_artifact(tmp_path, REPO)
    with pytest.raises(OutputError, match="not a valid Hub id"):
        push_artifact(artifact, "a/b/c")
    with pytest.raises(FormatError, match="is no result of"):
        push_artifact(artifact, REPO, quality=[artifact / "config.json"])
    monkeypatch.setattr("trapetum.push.LARGEST", 10**6)
    with pytest.raises(OutputError, match="at most 1,000,000 in one file"):
        push_artifact(artifact, REPO, dry_run=True)
    tokenizer = artifact / "tokenizer.json"
    tokenizer.write_bytes(tokenizer.read_bytes() + b" ")
    for dry_run in (False, True):
        with pytest.raises(OutputError, match="is damaged and not pushed"):
            push_artifact(artifact, REPO, dry_run=dry_run)
    assert hub.requests == []


def test_no_network(hub: Any, artifact: Path, monkeypatch: pytest.MonkeyPatch, waits: list[float]) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(OutputError, match="the Hub cannot be reached"):
        push_artifact(artifact, REPO)
