"""The share of one process in a job of several: ``--part I/N``, or what a batch system's environment says.

Shares are a pure function of the plan, so N processes on N machines agree without a word: tensors go, largest first,
to the share with the fewest bytes so far. What is only copied is dealt out apart from what is quantized, for a byte
of the one costs a thousandth of the time of a byte of the other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from trapetum.errors import RecipeError
from trapetum.quantize.plan import Plan

__all__ = ["COUNT_VARIABLE", "Share", "share_from_environment"]

COUNT_VARIABLE = "TRAPETUM_PART_COUNT"
"""Says how many completions an indexed Kubernetes Job has: Kubernetes itself tells a pod only its index."""

_LOCK = re.compile(r"part-(\d+)-of-(\d+)\.lock")


@dataclass(frozen=True)
class Share:
    """Part ``index`` of ``count``.

    Parameters
    ----------
    index : int
        From 1.
    count : int

    Raises
    ------
    RecipeError
        If the index is not between 1 and the count.
    """

    index: int
    count: int

    def __post_init__(self) -> None:
        if not 1 <= self.index <= self.count:
            raise RecipeError(f"part {self}: the first number must lie between 1 and the second")

    @classmethod
    def parse(cls, text: str) -> Share:
        """From ``I/N``.

        Raises
        ------
        RecipeError

        Examples
        --------
        >>> Share.parse("2/4")
        Share(index=2, count=4)
        """
        match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
        if match is None:
            raise RecipeError(f"part {text!r}: write I/N, such as 2/4")
        return cls(int(match[1]), int(match[2]))

    @classmethod
    def of_lock(cls, name: str) -> Share | None:
        """The share that a lock file of this name belongs to."""
        match = _LOCK.fullmatch(name)
        return cls(int(match[1]), int(match[2])) if match else None

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @property
    def label(self) -> str:
        """For file names."""
        return f"part-{self.index}-of-{self.count}"

    @property
    def lock(self) -> str:
        """File name of the lock that keeps a second process from the same share."""
        return f"{self.label}.lock"

    def tensors(self, plan: Plan) -> list[int]:
        """Numbers of the plan's tensors in this share, ascending.

        Parameters
        ----------
        plan : Plan
            Surveyed, so that all processes know alike what is only copied.
        """
        mine: list[int] = []
        for quantized in (True, False):
            loads = [0] * self.count
            group = [i for i, r in enumerate(plan.rows) if r.quantized is quantized]
            for i in sorted(group, key=lambda i: (-plan.rows[i].source_nbytes, i)):
                least = loads.index(min(loads))
                loads[least] += max(plan.rows[i].source_nbytes, 1)
                if least == self.index - 1:
                    mine.append(i)
        return sorted(mine)


def share_from_environment(environment: Mapping[str, str]) -> tuple[Share | None, str | None]:
    """The share that a batch system gives this process.

    Parameters
    ----------
    environment : mapping
        ``os.environ``. A Slurm array sets ``SLURM_ARRAY_TASK_ID``, ``_COUNT``, ``_MIN`` and ``_STEP``; an indexed
        Kubernetes Job sets ``JOB_COMPLETION_INDEX`` (from 0), its manifest must add :data:`COUNT_VARIABLE`.

    Returns
    -------
    share : Share or None
    note : str or None
        What was found, to be said aloud.

    Raises
    ------
    RecipeError
        If the variables contradict each other.
    """
    if "SLURM_ARRAY_TASK_ID" in environment:
        number, count, first, step = (
            _whole(environment, f"SLURM_ARRAY_TASK_{key}", default)
            for key, default in (("ID", None), ("COUNT", None), ("MIN", 1), ("STEP", 1))
        )
        place, rest = divmod(number - first, max(step, 1))
        if rest or not 0 <= place < count:
            raise RecipeError(
                f"SLURM_ARRAY_TASK_ID is {number} in an array of {count} tasks that begins at {first} in steps of "
                f"{step}: its place is not known",
                hint="Submit a plain range such as --array=1-4, or give --part I/N.",
            )
        share = Share(place + 1, count)
        return (
            share,
            f"part {share}, from the Slurm array (SLURM_ARRAY_TASK_ID={number}); --part 1/1 is the whole",
        )
    if "JOB_COMPLETION_INDEX" in environment:
        index = _whole(environment, "JOB_COMPLETION_INDEX", None)
        if COUNT_VARIABLE not in environment:
            return None, (
                f"JOB_COMPLETION_INDEX is set and {COUNT_VARIABLE} is not: this process does the whole model; "
                "set both, or give --part I/N, to share it"
            )
        share = Share(index + 1, _whole(environment, COUNT_VARIABLE, None))
        return share, f"part {share}, from JOB_COMPLETION_INDEX={index} and {COUNT_VARIABLE}"
    return None, None


def _whole(environment: Mapping[str, str], name: str, default: int | None) -> int:
    text = environment.get(name, "" if default is None else str(default))
    if not re.fullmatch(r"\d{1,9}", text):
        raise RecipeError(
            f"{name} is {text!r}; a whole number is needed",
            hint="Set it, or give --part I/N.",
        )
    return int(text)
