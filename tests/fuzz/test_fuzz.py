"""Every reader against damaged files: hypothesis always, a longer random run in the slow set, with its counts."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import fuzz
import fuzz_inputs
import fuzz_targets
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

STEPS = st.lists(
    st.tuples(st.integers(0, 63), st.floats(0, 1), st.integers(0, (1 << 60) - 1)), min_size=1, max_size=4
)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """A target by name, with valid files of its own."""
    root = tmp_path_factory.mktemp("fuzz")
    base = fuzz_inputs.make_base(root / "base")
    made: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in made:
            made[name] = fuzz.Bench(fuzz_targets.TARGETS[name], base, root / "work" / name)
        return made[name]

    return get


@pytest.mark.parametrize("name", fuzz_targets.TARGETS)
def test_the_valid_input_is_accepted(name: str, bench: Callable[[str], Any]) -> None:
    """Else every damage would be refused for another reason than its own."""
    target = bench(name)
    for number in range(len(target.target.uses)):
        before = target.counts.accepted
        target.run(number * len(target.files), [])
        assert (
            target.counts.accepted == before + 1 or name == "job"
        )  # a job that is not done cannot be merged


@pytest.mark.parametrize("name", fuzz_targets.TARGETS)
def test_nothing_but_a_trapetum_error(name: str, bench: Callable[[str], Any]) -> None:
    target = bench(name)

    @settings(
        max_examples=int(
            os.environ.get("TRAPETUM_FUZZ_EXAMPLES", "5" if name.startswith("golden") else "12")
        ),
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.integers(0, (1 << 20) - 1), STEPS)
    def run(pick: int, steps: list[Any]) -> None:
        target.run(pick, steps)

    run()


@pytest.mark.slow
@pytest.mark.parametrize("name", fuzz_targets.TARGETS)
def test_for_a_while(name: str, bench: Callable[[str], Any], capsys: pytest.CaptureFixture[str]) -> None:
    target = bench(name)
    target.counts = fuzz.Counts()
    # The count ends it, never the time where the machine is not far slower: the same inputs everywhere.
    seconds, executions, seed = (
        int(os.environ.get(f"TRAPETUM_FUZZ_{key}", default))
        for key, default in (("SECONDS", 120), ("EXECUTIONS", 300), ("SEED", 1))
    )
    counts = fuzz.fuzz(target, seconds, seed, executions=executions)
    with capsys.disabled():
        print(
            f"\nfuzz {name}: {counts.executions} executions, {counts.accepted} accepted, {counts.refused} refused"
        )
    assert counts.faults == []
    assert counts.executions > 3


@pytest.mark.parametrize("name", ["safetensors", "recipe"])
def test_a_fault_would_be_seen(name: str, bench: Callable[[str], Any]) -> None:
    """The harness itself: a use that raises something else is reported."""
    target = bench(name)
    uses, counts = target.target.uses, target.counts
    try:
        target.target.uses, target.counts = (lambda path: 1 / 0,), fuzz.Counts()
        found = fuzz.fuzz(target, 0.2, 0)
        assert found.faults
        assert "ZeroDivisionError" in found.faults[0]
    finally:
        target.target.uses, target.counts = uses, counts
