"""What an unfinished job is: ``DIR/.trapetum/job.json``, written before the first tensor, compared at resume.

The finished parts beside it are the record of progress (``formats.parts``); this file says which job they belong to:
the resolved recipe, the SHA-256 of every source file, the tool's version. A run with any other value is refused,
naming the key, before anything is touched. A file that cannot be read belongs to no job: the work is begun anew.

``run.jsonl`` holds what is *not* part of the identity: times, host, CPU features, versions. One JSON object a line.
"""

from __future__ import annotations

import json
import platform
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trapetum.errors import OutputError
from trapetum.formats.atomic import WORK_FOLDER, disk_errors, write_atomic
from trapetum.formats.checksums import log_seal
from trapetum.formats.manifest import RUN_LOG

if TYPE_CHECKING:
    from trapetum.quantize.plan import Plan

__all__ = ["Journal", "RunLog", "first_difference"]

_STATE = "job.json"
_HASHES = "source.json"
_VERSION = 3


@dataclass(frozen=True)
class Journal:
    """The identity of the job in an output folder.

    Parameters
    ----------
    folder : Path
        The output folder.
    """

    folder: Path

    @property
    def hashes(self) -> Path:
        """Where the source's hashes are remembered."""
        return self.folder / WORK_FOLDER / _HASHES

    def read(self) -> dict[str, Any] | None:
        """The stored identity and findings; None if there is no readable file."""
        try:
            data = json.loads((self.folder / WORK_FOLDER / _STATE).read_bytes())
        except (OSError, ValueError):
            return None
        whole = isinstance(data, dict) and data.get("version") == _VERSION
        keys = {"identity": dict, "recipe": dict, "wide": list, "schemes": dict, "notes": list, "model": str}
        return data if whole and all(isinstance(data.get(k), t) for k, t in keys.items()) else None

    def write(self, identity: Mapping[str, Any], plan: Plan) -> None:
        """Begin a job: its identity, and what the survey of its source settled."""
        data = {
            "version": _VERSION,
            "identity": dict(identity),
            "recipe": plan.recipe.resolved(),  # with the choices of a budget, which the identity's leaves open
            "wide": [r.name for r in plan.rows if r.wide],
            "schemes": {r.name: r.scheme.spec() for r in plan.rows},
            "notes": list(plan.notes),
            "model": str(plan.source.path.absolute()),  # where other processes of the job find it
        }
        write_atomic(self.folder / WORK_FOLDER / _STATE, json.dumps(data, indent=1).encode())

    def require_same(self, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
        """Refuse to go on with another job.

        Raises
        ------
        OutputError
            Names the first key that differs, and both values.
        """
        difference = first_difference(stored, wanted)
        if difference is None:
            return
        key, before, now = difference
        if key.startswith("source.files."):
            raise OutputError(
                f"{self.folder}: source file {key.removeprefix('source.files.')} is not the one that the unfinished "
                f"job in this folder reads (sha256 {_short(before)} then, {_short(now)} now)",
                hint="Give the same source, or begin anew with --no-resume, or choose another output with -o.",
            )
        raise OutputError(
            f"{self.folder}: holds an unfinished job with other settings: {key} is {_short(before)} there "
            f"and {_short(now)} now",
            hint="Give the same options, or begin anew with --no-resume, or choose another output with -o.",
        )


def first_difference(before: Any, now: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """(path, value, value) of the first place where two JSON values differ; None where they do not.

    Examples
    --------
    >>> first_difference({"recipe": {"rules": [{"bits": 3}]}}, {"recipe": {"rules": [{"bits": 4}]}})
    ('recipe.rules[0].bits', 3, 4)
    """
    for key, a, b in _pairs(before, now):
        found = first_difference(a, b, path + key)
        if found is not None:
            return found
    if (isinstance(before, dict) and isinstance(now, dict)) or (
        isinstance(before, list) and isinstance(now, list)
    ):
        return None
    return None if before == now else (path.lstrip("."), before, now)


def _pairs(before: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in [*before, *(k for k in now if k not in before)]:
            yield f".{key}", before.get(key), now.get(key)
    elif isinstance(before, list) and isinstance(now, list):
        for i in range(max(len(before), len(now))):
            a, b = (x[i] if i < len(x) else None for x in (before, now))
            yield f"[{i}]", a, b


def _short(value: Any) -> str:
    if value is None:
        return "absent"
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


class RunLog:
    """Append what happened, outside the artifact's identity; :meth:`seal` makes a changed byte visible all the same.

    Parameters
    ----------
    folder : Path
        The output folder, locked.
    label : str
        Of a process that shares the folder: it writes ``LABEL.jsonl``, which :meth:`collect` adds to the one log.
    """

    def __init__(self, folder: Path, label: str = "") -> None:
        self._path = folder / WORK_FOLDER / (f"{label}.jsonl" if label else RUN_LOG)

    def collect(self) -> None:
        """Append the logs of all processes that shared the folder, and remove them."""
        for other in sorted(self._path.parent.glob("part-*.jsonl")):
            with disk_errors(self._path), open(self._path, "ab") as file:
                file.write(other.read_bytes())
            other.unlink()

    def seal(self) -> None:
        """End the log with the checksum of all lines so far; see ``formats.artifact``."""
        with disk_errors(self._path), open(self._path, "ab") as file:
            file.write(log_seal(self._path))

    def start(self, threads: int) -> None:
        """Say which machine and which versions work from here on."""
        import llvmlite
        import llvmlite.binding
        import numba
        import numpy

        import trapetum

        self.add(
            event="start",
            host=socket.gethostname(),
            platform=platform.platform(),
            cpu=llvmlite.binding.get_host_cpu_name(),
            cpu_features=llvmlite.binding.get_host_cpu_features().flatten(),
            threads=threads,
            versions={
                "trapetum": trapetum.__version__,
                "python": sys.version.split()[0],
                "numpy": numpy.__version__,
                "numba": numba.__version__,
                "llvmlite": llvmlite.__version__,
            },
        )

    def add(self, **fields: Any) -> None:
        """Append one line with the time (UTC)."""
        line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **fields}
        with disk_errors(self._path), open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
