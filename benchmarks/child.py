"""A command in a process of its own, with what it used.

A child's ``ru_maxrss`` is never below what its parent had resident when it was started, because the kernel counts the
moment between fork and exec: under a parent of 1.3 GB every child "needs" 1.3 GB. So an interpreter of 10 MB that has
loaded nothing stands between, starts the command and says what that used.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Used", "measured"]

_BETWEEN = """
import json, resource, subprocess, sys
code = subprocess.call(sys.argv[1:])
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([used.ru_utime + used.ru_stime, used.ru_maxrss * 1024]))
sys.exit(code)
"""


@dataclass(frozen=True)
class Used:
    """What a command printed, its CPU seconds, and its largest resident size in bytes."""

    stdout: str
    cpu_seconds: float
    peak_bytes: int

    @property
    def peak_mib(self) -> float:
        """The size in MiB."""
        return self.peak_bytes / 2**20


def measured(*command: str, env: Mapping[str, str] | None = None) -> Used:
    """Run a command to its end.

    Parameters
    ----------
    *command : str
    env : mapping, optional
        Environment; this process's by default.

    Raises
    ------
    SystemExit
        If the command fails, with the end of what it said.
    """
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _BETWEEN, *command], capture_output=True, text=True, env=env
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit {done.returncode}: {done.stderr[-2000:]}")
    *printed, last = done.stdout.splitlines(keepends=True)
    seconds, peak = json.loads(last)
    return Used("".join(printed), seconds, peak)
