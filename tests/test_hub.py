"""Names of models become paths; every failure of the Hub is one sentence without the token. Nothing is downloaded."""

from __future__ import annotations

import errno
import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from trapetum.errors import CheckpointError
from trapetum.hub import DOWNLOADED, resolve_model
from trapetum.progress import Progress

TOKEN = "hf_secretsecretsecret"


class Notes(Progress):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """A stand-in for the client: records its call; raises or returns what the test puts in."""
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "model.safetensors").touch()
    state: dict[str, Any] = {"calls": [], "result": str(snapshot)}

    def fake(repo_id: str, **options: Any) -> str:
        state["calls"].append((repo_id, options))
        if isinstance(state["result"], BaseException):
            raise state["result"]
        return state["result"]

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    monkeypatch.setattr("trapetum.hub_errors.time.sleep", lambda seconds: None)
    monkeypatch.chdir(tmp_path)
    return state


def http_error(kind: type[Exception], status: int) -> Exception:
    """An error as the client raises it; its text carries the token on purpose."""
    error = kind.__new__(kind)
    Exception.__init__(error, f"{status} for url with {TOKEN}")
    error.response = SimpleNamespace(status_code=status)  # type: ignore[attr-defined]
    return error


def test_a_path_wins(hub: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "x.safetensors").touch()
    assert resolve_model("org/name") == Path("org/name")
    assert resolve_model(tmp_path / "x.safetensors") == tmp_path / "x.safetensors"
    assert hub["calls"] == []
    with pytest.raises(CheckpointError, match="revision was given"):
        resolve_model("org/name", revision="main")


def test_a_hub_id_is_fetched(hub: dict[str, Any], tmp_path: Path) -> None:
    notes = Notes()
    assert (
        resolve_model("Org-1/Name_2.5", revision="v1", token=TOKEN, progress=notes) == tmp_path / "snapshot"
    )
    assert resolve_model("gpt2") == tmp_path / "snapshot"
    (name, options), (second, _) = hub["calls"]
    assert (name, second) == ("Org-1/Name_2.5", "gpt2")
    assert (options["revision"], options["token"]) == ("v1", TOKEN)
    assert len(notes.texts) == 1
    assert TOKEN not in notes.texts[0]


def test_only_weights_and_their_company_are_fetched(hub: dict[str, Any]) -> None:
    resolve_model("gpt2")
    options = hub["calls"][0][1]

    def fetched(name: str) -> bool:
        allowed = any(fnmatch.fnmatch(name, pattern) for pattern in options["allow_patterns"])
        return allowed and not any(fnmatch.fnmatch(name, pattern) for pattern in options["ignore_patterns"])

    assert options["allow_patterns"] == list(DOWNLOADED)
    for name in (
        "model-00001-of-00002.safetensors",
        "config.json",
        "tokenizer.model",
        "merges.txt",
        "chat_template.jinja",
    ):
        assert fetched(name)
    for name in (
        "pytorch_model.bin",
        "original/model.safetensors",
        "modeling_x.py",
        "model.gguf",
        "onnx/config.json",
    ):
        assert not fetched(name)


def test_the_clients_bars_are_silent(hub: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    resolve_model("gpt2")
    bar = hub["calls"][0][1]["tqdm_class"](total=3, desc="x", disable=False)
    bar.update(2)
    bar.close()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "name", ["/no/such/folder", "./x", "../org/name", "a/b/c", "x y", "", "-x", "x.safetensors", "a/b.git"]
)
def test_no_path_and_no_id(hub: dict[str, Any], name: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        resolve_model(name)
    assert "no such file or folder" in caught.value.message
    assert hub["calls"] == []


def chained(outer: Exception, inner: Exception) -> Exception:
    outer.__cause__ = inner
    return outer


@pytest.mark.parametrize(
    ("error", "mention"),
    [
        (http_error(errors.GatedRepoError, 403), "licence must be accepted"),
        (http_error(errors.RepositoryNotFoundError, 404), "neither a local path nor a model on the Hub"),
        (http_error(errors.RevisionNotFoundError, 404), "no such revision"),
        (http_error(errors.HfHubHTTPError, 401), "token"),
        (http_error(errors.HfHubHTTPError, 403), "denies access"),
        (http_error(errors.HfHubHTTPError, 404), "no such model or file"),
        (http_error(errors.HfHubHTTPError, 503), "HTTP status 503"),
        (chained(errors.LocalEntryNotFoundError(TOKEN), http_error(errors.HfHubHTTPError, 429)), "slow down"),
        (errors.LocalEntryNotFoundError(TOKEN), "cannot be reached"),
        (errors.OfflineModeIsEnabled(TOKEN), "cannot be reached"),
        (errors.HFValidationError(TOKEN), "valid Hub id"),
        (ConnectionError(TOKEN), "cannot be reached"),
        (TimeoutError(TOKEN), "cannot be reached"),
        (type("ReadTimeout", (type("TransportError", (Exception,), {}),), {})(TOKEN), "cannot be reached"),
        (RuntimeError(TOKEN), "download failed (RuntimeError)"),
        (OSError(errno.ENOSPC, TOKEN), "No space left on device"),
        (OSError(errno.EDQUOT, TOKEN), "quota exceeded"),
        (OSError(TOKEN), "download failed (OSError)"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_a_failure_is_one_sentence_without_the_token(
    hub: dict[str, Any], error: Exception, mention: str
) -> None:
    hub["result"] = error
    with pytest.raises(CheckpointError) as caught:
        resolve_model("org/name", token=TOKEN)
    assert "org/name" in caught.value.message
    assert mention in caught.value.message
    assert TOKEN not in f"{caught.value.message} {caught.value.hint}"
    assert caught.value.__suppress_context__
