"""Fuzz targets for every reader: valid small files, damaged at random; nothing but a TrapetumError may come of it.

    python tests/fuzz/fuzz.py --seconds 30                  # each target for 30 s; a JSON line with counts for each
    python tests/fuzz/fuzz.py --target gguf --seed 7 ...    # one target; the seed makes a run repeatable
    python tests/fuzz/fuzz.py --atheris --target cbk        # guided by coverage, where atheris is installed

An input that ends in any other exception, takes longer than SLOWEST seconds, or kills the process is a fault; it is
kept in the folder that ``--keep`` names. The files are made in fuzz_inputs.py, opened in fuzz_targets.py, and
damaged in fuzz_damage.py.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path

from fuzz_damage import Step, damage, random_steps
from fuzz_inputs import make_base
from fuzz_targets import TARGETS, Target

from trapetum.errors import TrapetumError

SLOWEST = 60.0  # CPU seconds for one input: 15 of them compile kernels, where none is kept yet


@dataclass
class Counts:
    """What became of the inputs of a target."""

    executions: int = 0
    accepted: int = 0
    refused: int = 0
    slowest: float = 0.0
    faults: list[str] = field(default_factory=list)


class Bench:
    """A target with its valid files; :meth:`run` damages one, uses it, and puts it back."""

    def __init__(self, target: Target, base: Path, folder: Path) -> None:
        self.target, self.counts = target, Counts()
        folder.mkdir(parents=True)
        self.path = target.make(base, folder)
        members = (
            [self.path]
            if self.path.is_file()
            else sorted({p for g in target.files for p in self.path.glob(g)})
        )
        self.files = {p: p.read_bytes() for p in members if p.is_file()}
        self.folder = folder
        self.whole = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}

    def run(self, pick: int, steps: list[Step]) -> None:
        """One input.

        Raises
        ------
        BaseException
            Whatever is no TrapetumError.
        """
        file = list(self.files)[pick % len(self.files)]
        file.write_bytes(damage(self.files[file], steps))
        use = self.target.uses[(pick // len(self.files)) % len(self.target.uses)]
        begun = time.process_time()
        try:
            use(self.path)
            self.counts.accepted += 1
        except TrapetumError as error:
            if not error.message or "\n" in error.message:
                raise AssertionError(f"not one sentence: {error.message!r}") from error
            self.counts.refused += 1
        finally:
            self.counts.executions += 1
            self._restore()
        seconds = time.process_time() - begun
        self.counts.slowest = max(self.counts.slowest, seconds)
        assert seconds < SLOWEST, f"{seconds:.1f} s"

    def _restore(self) -> None:
        """A use may have written, as a merge does."""
        for path in self.folder.rglob("*"):
            if path.is_file() and path not in self.whole:
                path.unlink()
        for path, data in self.whole.items():
            if not path.is_file() or path.stat().st_size != len(data) or path.read_bytes() != data:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)


def fuzz(
    bench: Bench, seconds: float, seed: int, keep: Path | None = None, executions: int | None = None
) -> Counts:
    """Damage at random for so long, and at most so often: the same inputs on every machine that is fast enough."""
    rng = random.Random(f"{bench.target.name}{seed}")
    end = time.monotonic() + seconds
    while time.monotonic() < end and bench.counts.executions != executions:
        pick, steps = rng.getrandbits(20), random_steps(rng)
        try:
            bench.run(pick, steps)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            where = f"{type(error).__name__}: {error}; pick {pick}, steps {steps}"
            bench.counts.faults.append(where)
            if keep is not None:
                keep.mkdir(parents=True, exist_ok=True)
                file = list(bench.files)[pick % len(bench.files)]
                (keep / f"{bench.target.name}-{pick}-{file.name}").write_bytes(
                    damage(bench.files[file], steps)
                )
    return bench.counts


def _guided(bench: Bench, arguments: list[str]) -> None:
    """libFuzzer through atheris: its bytes replace a whole file."""
    import atheris

    def one(data: bytes) -> None:
        if len(data) < 2:
            return
        file = list(bench.files)[data[0] % len(bench.files)]
        bench.files[file] = data[2:]
        bench.run(data[0] + len(bench.files) * data[1], [])

    atheris.instrument_all()
    atheris.Setup([sys.argv[0], *arguments], one)
    atheris.Fuzz()


def main() -> None:
    """Run the targets that were asked for; exit with 1 if any input was a fault."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", action="append", choices=[*TARGETS], help="all by default")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--executions", type=int, help="no end by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--atheris", action="store_true")
    options, rest = parser.parse_known_args()
    warnings.simplefilter("error")  # a reader that warns has computed with what it should have refused
    bad = 0
    with tempfile.TemporaryDirectory(prefix="trapetum-fuzz-") as root:
        base = make_base(Path(root) / "base")
        for name in options.target or TARGETS:
            bench = Bench(TARGETS[name], base, Path(root) / "work" / name)
            if options.atheris:
                _guided(bench, rest)
                return
            counts = fuzz(bench, options.seconds, options.seed, options.keep, options.executions)
            bad += len(counts.faults)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            print(json.dumps({"target": name, **counts.__dict__, "peak_rss_mib": peak // 1024}), flush=True)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
