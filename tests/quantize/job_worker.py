"""Run a job in a process of its own and stop it at a chosen moment.

    python job_worker.py MODEL OUT OPTIONS.json SIGNAL EVENT COUNT

SIGNAL: KILL, TERM, INT or none; EVENT: a stage's label, or ``line`` (a finished tensor), or ``advance``. With ``limit``
as SIGNAL, EVENT is the largest size of a file in bytes. Prints ``done`` or the error's class and message.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys

from trapetum.cli.output import Terminated, sigterm_raises
from trapetum.errors import TrapetumError
from trapetum.progress import Progress
from trapetum.quantize.job import quantize_model


class StopAt(Progress):
    """Send this process a signal at the COUNT-th event."""

    def __init__(self, number: int, event: str, count: int) -> None:
        self.number, self.event, self.left = number, event, count

    def _seen(self, event: str) -> None:
        if event == self.event:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), self.number)

    def begin(self, label: str, total: int, unit: str = "B") -> None:
        self._seen(label)

    def advance(self, amount: int, line: str | None = None) -> None:
        self._seen("line" if line is not None else "advance")


def main() -> None:
    model, out, options, name, event, count = sys.argv[1:]
    progress = Progress()
    if name == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(event), int(event)))
    elif name != "none":
        progress = StopAt(getattr(signal, f"SIG{name}"), event, int(count))
    try:
        with sigterm_raises():
            quantize_model(model, out, progress=progress, **json.loads(options))
        print("done")
    except TrapetumError as e:
        print(f"{type(e).__name__}: {e.message}")
    except (Terminated, KeyboardInterrupt) as e:
        print(type(e).__name__)


if __name__ == "__main__":
    main()
