"""What a person sees while a long command works: a bar on a terminal, plain lines in a log.

A log gets at most one line for each finished tensor, or one every 30 s where the work reports no tensors, and
never a carriage return. Both receivers may be called from worker threads.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from typing import Any

from trapetum.cli.output import human_bytes, note
from trapetum.progress import Progress

__all__ = ["BarProgress", "LogProgress", "terminal_progress"]

_LOG_SECONDS = 30.0


def terminal_progress() -> Progress:
    """The receiver that suits stderr: a bar where it is a terminal, else log lines."""
    return BarProgress() if sys.stderr.isatty() else LogProgress()


class BarProgress(Progress):
    """A tqdm bar on stderr, one for each stage; notes are printed above it."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._lock = threading.Lock()  # tqdm's own counter is not safe under threads

    def begin(self, label: str, total: int, unit: str = "B") -> None:
        """Open a bar of ``total`` units."""
        from tqdm import tqdm

        self.end()
        scaled = unit == "B"
        self._bar = tqdm(
            total=total,
            desc=label,
            unit=unit,
            unit_scale=scaled,
            unit_divisor=1024 if scaled else 1000,
            dynamic_ncols=True,
            leave=False,
            file=sys.stderr,
        )

    def advance(self, amount: int, line: str | None = None) -> None:
        """Move the bar; the line of a finished tensor is for logs only."""
        with self._lock:
            if self._bar is not None:
                self._bar.update(amount)

    def note(self, text: str) -> None:
        """Print the text above the bar."""
        if self._bar is None:
            note(f"note: {text}")
        else:
            self._bar.write(f"note: {text}", file=sys.stderr)

    def end(self) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class LogProgress(Progress):
    """Plain lines on stderr.

    Parameters
    ----------
    seconds : float
        The shortest time between two lines that no finished tensor caused.
    """

    def __init__(self, seconds: float = _LOG_SECONDS) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._label, self._unit = "", "B"
        self._total = self._done = 0
        self._begun = self._last = 0.0

    def begin(self, label: str, total: int, unit: str = "B") -> None:
        """Say the stage and its size."""
        with self._lock:
            self._label, self._total, self._unit, self._done = label, total, unit, 0
            self._begun = self._last = time.monotonic()
            note(f"{label}: {self._amount(total)}")

    def advance(self, amount: int, line: str | None = None) -> None:
        """Print the finished tensor's line, or, at most every ``seconds``, how far the stage is."""
        with self._lock:
            self._done += amount
            now = time.monotonic()
            if line is not None:
                note(line)
            elif now - self._last < self._seconds:
                return
            else:
                share = 100.0 * self._done / self._total if self._total else 100.0
                done, total = self._amount(self._done), self._amount(self._total)
                left = (now - self._begun) * (100.0 / share - 1) if share else math.inf
                more = f", about {_duration(left)} left" if 0 < left < math.inf else ""
                note(f"{self._label}: {done} of {total} ({share:.0f} %{more})")
            self._last = now

    def note(self, text: str) -> None:
        """Print the text as a line of its own."""
        note(f"note: {text}")

    def _amount(self, count: int) -> str:
        return human_bytes(count) if self._unit == "B" else f"{count:,} {self._unit}"


def _duration(seconds: float) -> str:
    """``40 s``, ``12 min`` or ``3.4 h``."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"
