"""How the library tells a person what it is doing, without printing.

A long operation takes a ``Progress``; the library calls it, the command line draws a bar on a terminal and
plain lines in a log, a Python caller passes nothing and gets silence.
"""

from __future__ import annotations

__all__ = ["Progress"]


class Progress:
    """Receiver of progress; this base class ignores everything. All methods may be called from worker threads."""

    def begin(self, label: str, total: int, unit: str = "B") -> None:
        """Start a stage of ``total`` units (bytes of source weights unless said otherwise)."""

    def advance(self, amount: int, line: str | None = None) -> None:
        """Report ``amount`` more units done; ``line`` is one finished tensor's summary for a log."""

    def note(self, text: str) -> None:
        """Say one thing that the person should know (a fallback, an unused file, a warning)."""

    def end(self) -> None:
        """Finish the current stage."""
