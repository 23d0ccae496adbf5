"""The counts behind "can be trusted with a week's work": runs the tests that count, and adds up.

    python benchmarks/trust.py [--seconds 10] [--kills 50] [--only cases,kills,faults,fuzz]

Prints a JSON line for each kind of trial and one for all: inputs tried and verdicts right (the outside catalogue, where
it is at hand), kills survived with equal bytes, calls that were made to fail with nothing lost, damaged inputs given to
the readers. Exits with 1 if anything was lost, wrong or crashed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"


def run(*arguments: str, **variables: str) -> tuple[bool, str]:
    """Run pytest on a part of the tests; whether all passed, and what was printed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(
        command, cwd=TESTS.parent, env={**os.environ, **variables}, capture_output=True, text=True
    )
    return done.returncode == 0, done.stdout


def numbers(pattern: str, text: str) -> list[int]:
    """Sums of the groups of every match."""
    found = [[int(n) for n in match.groups()] for match in re.finditer(pattern, text)]
    return [sum(column) for column in zip(*found)] if found else []


def cases(options: argparse.Namespace) -> dict[str, object]:
    """The catalogue, through inspect, dry run, quantize and verify."""
    passed, text = run("-m", "slow or not slow", "tests/cases")
    got = numbers(r"catalogue: (\d+) inputs, (\d+) verdicts right, (\d+) wrong", text) or [0, 0, 0]
    checks = numbers(r"(\d+) passed", text) or [0]
    return {
        "passed": passed,
        "inputs": got[0],
        "verdicts_right": got[1],
        "wrong": got[2],
        "checks": checks[0],
    }


def kills(options: argparse.Namespace) -> dict[str, object]:
    """SIGKILL at random moments."""
    passed, text = run("-m", "slow", "tests/reliability/test_kills.py", TRAPETUM_KILLS=str(options.kills))
    match = re.search(r"kills: (\{.*\})", text)
    counts = json.loads(match[1]) if match else {"kills": 0, "scenarios": {}}
    return {
        "passed": passed,
        "kills_survived": counts["kills"] if passed else 0,
        "scenarios": counts["scenarios"],
    }


def faults(options: argparse.Namespace) -> dict[str, object]:
    """Calls of the operating system that fail, full and read-only disks, clocks, memory, two processes."""
    passed, text = run(
        "-m", "slow or not slow", "tests/reliability", "--ignore=tests/reliability/test_kills.py"
    )
    got = re.findall(r"faults injected: (\d+) of \d+ calls failed, (\d+) ended", text)
    injected, said = (sum(int(pair[i]) for pair in got) for i in (0, 1))
    checks = numbers(r"(\d+) passed", text) or [0]
    return {"passed": passed, "faults_injected": injected, "in_one_sentence": said, "checks": checks[0]}


def fuzz(options: argparse.Namespace) -> dict[str, object]:
    """Damaged files for every reader."""
    command = [sys.executable, str(TESTS / "fuzz" / "fuzz.py"), "--seconds", str(options.seconds)]
    done = subprocess.run(
        [*command, "--seed", str(options.seed)], capture_output=True, text=True, check=False
    )
    targets = [json.loads(line) for line in done.stdout.splitlines()]
    return {
        "passed": done.returncode == 0,
        "targets": len(targets),
        "executions": sum(t["executions"] for t in targets),
        "accepted": sum(t["accepted"] for t in targets),
        "refused": sum(t["refused"] for t in targets),
        "faults": [f for t in targets for f in t["faults"]],
    }


TRIALS: dict[str, Callable[[argparse.Namespace], dict[str, object]]] = {
    "cases": cases,
    "kills": kills,
    "faults": faults,
    "fuzz": fuzz,
}


def main() -> None:
    """Print a JSON line a kind of trial and one for all; exit with 1 if anything was lost.

    Usage: ``python benchmarks/trust.py [--seconds 10] [--kills 50] [--only cases,kills,faults,fuzz]``.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="for each fuzz target")
    parser.add_argument(
        "--seed", type=int, default=int(time.time()), help="of the fuzz targets; the time by default"
    )
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--only", default=",".join(TRIALS))
    options = parser.parse_args()
    good = True
    for name in options.only.split(","):
        begun = time.monotonic()
        found = TRIALS[name](options)
        good &= bool(found["passed"])
        print(json.dumps({"trial": name, "seconds": round(time.monotonic() - begun, 1), **found}), flush=True)
    print(json.dumps({"nothing_lost": good}))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
