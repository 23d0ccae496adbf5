"""Kill jobs at random moments, let them go on, and compare the end with an undisturbed run.

    python kill_worker.py MODEL FOLDER KILLS SEED

Prints a JSON object: kills by scenario, how many found a whole result in place, how many runs it took. Each job is a
forked child of this process, which has imported everything and started no thread, and is killed (SIGKILL) after a
random part of the time that an undisturbed one takes. Any loss ends this program with a message.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import trapetum
from trapetum.errors import FormatError, TrapetumError
from trapetum.formats.artifact import Artifact
from trapetum.formats.checksums import check_files, gguf_sums
from trapetum.quantize.job import quantize_model
from trapetum.quantize.shared_job import merge_parts

OPTIONS = {"effort": "fast", "threads": 2, "max_shard_size": 700_000}


def child(work: Callable[[], object]) -> int:
    """Start work in a forked process; its pid."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except TrapetumError as error:
            print(f"{type(error).__name__}: {error.message}", file=sys.stderr)
            os._exit(1)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(2)
        os._exit(0)
    return pid


def finish(pid: int) -> bool:
    """Whether a child ended by itself (True) or was killed; any failure ends the program."""
    status = os.waitpid(pid, 0)[1]
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise SystemExit("a job failed")
    return not os.WIFSIGNALED(status)


def content(folder: Path) -> dict[str, bytes]:
    """What counts of an artifact or an export."""
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.is_file() and p.name != "run.jsonl"}


def artifact_is_whole(folder: Path) -> bool:
    """Whether there is an artifact; one that is there must be whole."""
    try:
        with Artifact.open(folder) as artifact:
            problems = [p for p in artifact.check_sums() if "not listed" not in p]
    except FormatError as error:
        if folder.exists() and "not finished" not in error.message and "trapetum.json" not in error.message:
            raise SystemExit(f"neither whole nor unfinished: {error.message}") from error
        return False
    if problems:
        raise SystemExit(f"a damaged artifact: {problems}")
    return True


class Killer:
    """Runs one kind of job again and again until it ends, killing it up to a number of times.

    ``length`` is about how many seconds an undisturbed one takes here.
    """

    def __init__(self, seed: int, length: float) -> None:
        self.random, self.length = random.Random(seed), length
        self.kills = self.whole = self.runs = 0

    def until_done(self, works: list[Callable[[], object]], most: int, look: Callable[[], bool]) -> None:
        """All of ``works`` at once, killed ``most`` times; then to their end."""
        while True:
            self.runs += 1
            pids = [child(work) for work in works]
            if most > 0:
                time.sleep(self.random.random() ** 1.5 * self.length)
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
            ended = [finish(pid) for pid in pids]
            if most > 0 and not all(ended):
                most -= 1
                self.kills += 1
                self.whole += look()
                continue
            if most <= 0 or all(ended):
                return


def main() -> None:
    """Run the scenarios in turn until so many kills are done."""
    model, root, wanted, seed = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    expected, lengths = {}, {}

    def undisturbed(work: Callable[[], object], *scenarios: str) -> None:
        begun = time.monotonic()
        if not finish(child(work)):
            raise SystemExit("the undisturbed run was killed")
        lengths.update(dict.fromkeys(scenarios, time.monotonic() - begun))

    for name, bits in {"new": 4, "old": 3}.items():
        undisturbed(
            lambda name=name, bits=bits: quantize_model(model, root / name, bits=bits, **OPTIONS),
            *("quantize", "replace", "parts"),
        )
        expected[name] = content(root / name)
    for format, out in {"gguf": "x.gguf", "cbk": "cbk"}.items():
        undisturbed(
            lambda f=format, o=out: trapetum.export_artifact(root / "new", f, root / "exports" / o), format
        )
    exports = {p.name: p.read_bytes() for p in (root / "exports").glob("x.gguf*")}
    exports |= content(root / "exports" / "cbk")
    counts = {}

    def quantize(killer: Killer, folder: Path, most: int) -> None:
        killer.until_done(
            [lambda: quantize_model(model, folder, bits=4, **OPTIONS)],
            most,
            lambda: artifact_is_whole(folder),
        )
        same(content(folder), expected["new"])

    def replace(killer: Killer, folder: Path, most: int) -> None:
        shutil.copytree(root / "old", folder)

        def work() -> None:
            try:
                quantize_model(model, folder, bits=4, overwrite=True, **OPTIONS)
            except TrapetumError:
                if not artifact_is_whole(folder):
                    raise

        killer.until_done([work], most, lambda: artifact_is_whole(folder))
        same(content(folder), expected["new"])

    def parts(killer: Killer, folder: Path, most: int) -> None:
        works = [lambda i=i: quantize_model(model, folder, bits=4, part=f"{i}/2", **OPTIONS) for i in (1, 2)]
        killer.until_done(works, most - most // 3, lambda: artifact_is_whole(folder))
        killer.until_done([lambda: merge_parts(folder)], most // 3, lambda: artifact_is_whole(folder))
        same(content(folder), expected["new"])

    def gguf(killer: Killer, folder: Path, most: int) -> None:
        out = folder / "x.gguf"

        def look() -> bool:
            if out.exists() and gguf_sums(out).exists() and check_files(gguf_sums(out)):
                raise SystemExit("a damaged GGUF under its own name")
            return out.exists()

        work = lambda: trapetum.export_artifact(root / "new", "gguf", out, overwrite=True)  # noqa: E731
        killer.until_done([work], most, look)
        same(content(folder), {n: d for n, d in exports.items() if n.startswith("x.gguf")})

    def cbk(killer: Killer, folder: Path, most: int) -> None:
        work = lambda: trapetum.export_artifact(root / "new", "cbk", folder, overwrite=True)  # noqa: E731
        killer.until_done([work], most, folder.exists)
        same(content(folder), {n: d for n, d in exports.items() if not n.startswith("x.gguf")})

    scenarios = {"quantize": quantize, "replace": replace, "parts": parts, "gguf": gguf, "cbk": cbk}
    done = round_number = 0
    while done < wanted or not all(entry["kills"] for entry in counts.values()):
        for name, scenario in scenarios.items():
            if done >= wanted and (name not in counts or counts[name]["kills"]):
                continue
            killer = Killer(seed * 1000 + round_number * 10 + len(counts), lengths[name])
            scenario(killer, root / f"{name}-{round_number}", min(6, max(1, wanted - done)))
            entry = counts.setdefault(name, {"kills": 0, "whole": 0, "runs": 0})
            for key in entry:
                entry[key] += getattr(killer, key)
            done += killer.kills
        round_number += 1
    left = [p.name for p in root.iterdir() if p.name.startswith(".")]
    if left:
        raise SystemExit(f"left behind: {left}")
    print(json.dumps({"kills": done, "scenarios": counts}))


def same(found: dict[str, bytes], wanted: dict[str, bytes]) -> None:
    """Equal names and bytes, or the end."""
    if found != wanted:
        raise SystemExit(f"other bytes: {sorted(found)} are not {sorted(wanted)}, or differ")


if __name__ == "__main__":
    main()
