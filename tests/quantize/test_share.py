"""Who does what: the spelling of a share, what batch systems say, and how tensors are dealt out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from trapetum.errors import RecipeError
from trapetum.formats.packed_ternary import open_checkpoint
from trapetum.quantize.plan import make_plan
from trapetum.quantize.recipe import resolve_recipe
from trapetum.quantize.share import Share, share_from_environment


@pytest.mark.parametrize("text", ["0/4", "5/4", "1", "1/0", "-1/4", "1/4/2", "a/b", ""])
def test_what_is_no_share(text: str) -> None:
    with pytest.raises(RecipeError, match="part "):
        Share.parse(text)


def test_a_share_and_its_lock() -> None:
    share = Share.parse("2/4")
    assert (str(share), share.lock) == ("2/4", "part-2-of-4.lock")
    assert Share.of_lock(share.lock) == share
    assert Share.of_lock("lock") is None


SLURM = {"SLURM_ARRAY_TASK_ID": "6", "SLURM_ARRAY_TASK_COUNT": "3"}


@pytest.mark.parametrize(
    ("environment", "share"),
    [
        ({}, None),
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}, None),
        ({"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "4"}, "3/4"),  # --array=1-4
        ({"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_COUNT": "4", "SLURM_ARRAY_TASK_MIN": "0"}, "4/4"),
        ({**SLURM, "SLURM_ARRAY_TASK_MIN": "2", "SLURM_ARRAY_TASK_STEP": "2"}, "3/3"),  # --array=2-6:2
        ({"JOB_COMPLETION_INDEX": "0", "TRAPETUM_PART_COUNT": "8"}, "1/8"),
    ],
)
def test_what_a_batch_system_says(environment: dict[str, str], share: str | None) -> None:
    found, note = share_from_environment(environment)
    assert (None if found is None else str(found)) == share
    assert (note is None) == (share is None)
    assert share is None or f"part {share}" in str(note)


def test_an_indexed_job_without_a_count_is_the_whole_and_says_so() -> None:
    found, note = share_from_environment({"JOB_COMPLETION_INDEX": "2"})
    assert found is None
    assert "TRAPETUM_PART_COUNT is not" in str(note)


@pytest.mark.parametrize(
    "environment",
    [
        {"SLURM_ARRAY_TASK_ID": "3"},
        {**SLURM, "SLURM_ARRAY_TASK_MIN": "2"},  # --array=2,3,6: the place of 6 is not known
        {**SLURM, "SLURM_ARRAY_TASK_MIN": "2", "SLURM_ARRAY_TASK_STEP": "3"},
        {"SLURM_ARRAY_TASK_ID": "x", "SLURM_ARRAY_TASK_COUNT": "4"},
        {"JOB_COMPLETION_INDEX": "8", "TRAPETUM_PART_COUNT": "8"},
        {"JOB_COMPLETION_INDEX": "0", "TRAPETUM_PART_COUNT": "many"},
    ],
)
def test_contradictions_are_refused(environment: dict[str, str]) -> None:
    with pytest.raises(RecipeError):
        share_from_environment(environment)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 40])
def test_shares_cover_the_plan_once_and_weigh_alike(make_model: Callable[..., Path], count: int) -> None:
    with open_checkpoint(make_model()) as source:
        plan = make_plan(source, resolve_recipe(bits=4))
    shares = [Share(i + 1, count).tensors(plan) for i in range(count)]
    assert sorted(i for share in shares for i in share) == list(range(len(plan.rows)))
    loads = [sum(plan.rows[i].source_nbytes for i in share if plan.rows[i].quantized) for share in shares]
    assert max(loads) - min(loads) <= max(r.source_nbytes for r in plan.rows)
    assert shares == [Share(i + 1, count).tensors(plan) for i in range(count)]
