"""Loads a model and generates, in processes as different as programs have them. Run by test_processes.py.

``python process_worker.py MODEL one`` prints the tokens as JSON; ``spawn`` prints those of three spawned workers that
run at the same time, after this process has used its own threads.
"""

from __future__ import annotations

import json
import multiprocessing
import sys

import trapetum

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def generate(job: tuple[str, int]) -> list[int]:
    """Twelve tokens after ``PROMPT`` with so many threads."""
    path, threads = job
    with trapetum.load(path, threads=threads, precision="fast") as model:
        return model.generate(PROMPT, 12, stop_ids=())


def main(path: str, how: str) -> None:
    """See the module."""
    mine = generate((path, 2))
    if how == "spawn":
        with multiprocessing.get_context("spawn").Pool(3) as pool:
            print(json.dumps([mine, *pool.map(generate, [(path, threads) for threads in (1, 2, 3)])]))
    else:
        print(json.dumps(mine))


if __name__ == "__main__":
    main(*sys.argv[1:])
