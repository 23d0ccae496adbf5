"""The one sink: streams, exit codes, and what an error looks like."""

from __future__ import annotations

import errno
import json
import os
import signal

import pytest

from trapetum.cli import output
from trapetum.errors import CheckpointError, TrapetumError, VerifyError


@pytest.fixture(autouse=True)
def _no_debug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRAPETUM_DEBUG", raising=False)
    monkeypatch.setattr(output._Debug, "on", False)


def _raised(error: BaseException) -> BaseException:
    """The error with a traceback, as a command raises it."""
    try:
        raise error
    except BaseException as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (CheckpointError("no config.json", hint="Copy it."), 1, "error: no config.json\nhint: Copy it.\n"),
        (VerifyError("bad sum"), 3, "error: bad sum\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (output.Terminated(), 143, "error: terminated by SIGTERM\n"),
        (BrokenPipeError(), 1, ""),
        (
            MemoryError(),
            1,
            "error: the machine ran out of memory\nhint: Give a smaller --max-memory, or fewer --threads.\n",
        ),
        (PermissionError(errno.EACCES, "Permission denied", "/a/b"), 1, "error: /a/b: Permission denied\n"),
        (
            OSError(errno.ENOSPC, "No space left on device", "w.bin"),
            1,
            "error: w.bin: no space left on the disk\n",
        ),
        (OSError("odd"), 1, "error: odd\n"),
    ],
)
def test_errors(error: BaseException, code: int, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert output.report_error(_raised(error)) == code
    out, err = capsys.readouterr()
    assert (out, err) == ("", text)


def test_an_unexpected_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert output.report_error(_raised(KeyError("two\nlines"))) == 1
    message, hint = capsys.readouterr().err.splitlines()
    assert message.startswith("error: internal error: KeyError: ")
    assert "test_output.py:" in message
    assert "--debug" in hint


@pytest.mark.parametrize("how", ["option", "environment"])
def test_debug_shows_the_traceback(
    how: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "option":
        output.enable_debug(True)
    else:
        monkeypatch.setenv("TRAPETUM_DEBUG", "1")
    output.report_error(_raised(TrapetumError("m")))
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert err.endswith("error: m\n")


def test_json_is_ascii_and_complete(capsys: pytest.CaptureFixture[str]) -> None:
    data = {"name": "é\udcff", "n": 1.5}
    output.emit(data, "text", as_json=True)
    out = capsys.readouterr().out
    assert out.isascii()
    assert json.loads(out) == data
    with pytest.raises(ValueError, match="not JSON compliant"):
        output.emit({"x": float("nan")}, "", as_json=True)


def test_sigterm_raises_within_the_block_only() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(output.Terminated), output.sigterm_raises():
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_fields_leave_out_none() -> None:
    assert output.fields({"a": 1, "long": None, "bc": "x"}) == "a   1\nbc  x"
    assert output.fields({}) == ""
