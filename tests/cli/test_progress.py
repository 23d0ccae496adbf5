"""Bars on a terminal, lines in a log."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor

import pytest

from trapetum.cli import progress
from trapetum.cli.progress import BarProgress, LogProgress, terminal_progress


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_receiver_suits_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", _Terminal())
    assert isinstance(terminal_progress(), BarProgress)
    monkeypatch.setattr("sys.stderr", io.StringIO())
    assert isinstance(terminal_progress(), LogProgress)


def test_a_log_has_a_line_a_tensor_and_no_carriage_return(capsys: pytest.CaptureFixture[str]) -> None:
    log = LogProgress()
    log.begin("quantizing", 4096)
    for k in range(3):
        log.advance(512)
        log.advance(512, f"tensor {k}")
    log.note("something")
    log.end()
    out, err = capsys.readouterr()
    assert out == ""
    assert "\r" not in err
    assert err.splitlines() == ["quantizing: 4.00 KiB", "tensor 0", "tensor 1", "tensor 2", "note: something"]


def test_a_log_without_tensors_has_a_line_every_while(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    log = LogProgress(seconds=30)
    log.begin("windows", 100, unit="windows")
    for _ in range(100):  # a second each: a line at 30, 60 and 90
        now[0] += 1.0
        log.advance(1)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "windows: 100 windows",
        "windows: 30 windows of 100 windows (30 %, about 1 min left)",
        "windows: 60 windows of 100 windows (60 %, about 40 s left)",
        "windows: 90 windows of 100 windows (90 %, about 10 s left)",
    ]


def test_a_bar_counts_under_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", _Terminal())
    bar = BarProgress()
    bar.begin("work", 8000)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: [bar.advance(1) for _ in range(1000)], range(8)))
    assert bar._bar.n == 8000
    bar.note("above the bar")
    bar.end()
    bar.end()
    bar.advance(1)  # after the end: nothing to move
