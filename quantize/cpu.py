"""Which instructions this machine's CPU has: the condition under which two runs give the same bytes.

Loops are compiled for the CPU at hand, without re-association; results are promised to be equal for equal feature
sets only. Each finished tensor carries the set of the machine that made it (``formats.parts``), and whoever
assembles an artifact from them checks that there is one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cache

from trapetum.errors import OutputError
from trapetum.formats.parts import Part

__all__ = ["cpu_features", "require_one_cpu"]


@cache
def cpu_features() -> str:
    """Names of the features that compiled loops may use here, sorted, joined by commas.

    ``NUMBA_CPU_FEATURES`` (numba's own variable) narrows what loops use, and is believed.
    """
    import llvmlite.binding

    text = os.environ.get("NUMBA_CPU_FEATURES") or llvmlite.binding.get_host_cpu_features().flatten()
    return ",".join(sorted(name[1:] for name in text.split(",") if name.startswith("+")))


def require_one_cpu(folder: object, parts: Iterable[Part], here: str | None = None) -> None:
    """Refuse tensors that were made on CPUs with different features.

    Parameters
    ----------
    folder : path
        Named in the message.
    parts : iterable of Part
        Finished tensors.
    here : str, optional
        Features of this machine, which is about to make more.

    Raises
    ------
    OutputError
    """
    makers: dict[str, list[str]] = {} if here is None else {here: ["this machine"]}
    for part in parts:
        makers.setdefault(part.cpu, []).append(part.name)
    if len(makers) <= 1:
        return
    common = set.intersection(*(set(cpu.split(",")) for cpu in makers))
    groups = []
    for cpu, names in sorted(makers.items(), key=lambda item: (-len(item[1]), item[0])):
        own = " ".join(sorted(set(cpu.split(",")) - common))
        what = f"with {own}" if own else "only with what all have"
        groups.append(
            f"{names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}: {what if cpu else 'unknown'}"
        )
    raise OutputError(
        f"{folder}: tensors were made on CPUs with different features ({'; '.join(groups)}); the bytes may differ "
        "from those of a run on one machine",
        hint="Work on equal machines, or accept the mixture with --mixed-cpus.",
    )
