"""A small job that writes an artifact, and a loop that kills it at every step. Run by test_assemble.py.

``python artifact_worker.py write FOLDER`` writes; ``... kill FOLDER STRIDE [SEED]`` kills a forked writer before every
STRIDE-th call that changes the disk, checks what is there, lets another finish, and compares with an unkilled run. One
process, freshly started and without threads, so that forking is safe.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from trapetum.errors import FormatError, TrapetumError
from trapetum.formats.artifact import Artifact
from trapetum.formats.assemble import assemble, resume_assembly
from trapetum.formats.atomic import WORK_FOLDER, FolderLock
from trapetum.formats.manifest import artifact_config, build_manifest
from trapetum.formats.output_folder import PARTS, output_state
from trapetum.formats.parts import PartWriter, read_part
from trapetum.tensors import CodebookTensor, DenseTensor, QuantizedTensor, matrix_shape

CALLS = ("replace", "unlink", "rmdir", "fsync", "mkdir", "copy_file_range", "pwrite", "ftruncate")


def tensors(seed: int) -> dict[str, QuantizedTensor]:
    """A few small tensors of every sort."""
    rng = np.random.default_rng(seed)

    def codebook(shape: tuple[int, ...], size: int, dtype: Any) -> CodebookTensor:
        rows, in_features = matrix_shape(shape)
        codes = rng.integers(0, size, (rows, in_features)).astype(np.uint8)
        return CodebookTensor(codes, rng.normal(size=(rows, size)).astype(dtype), shape)

    return {
        "embed": DenseTensor(rng.normal(size=(6, 5)).astype(ml_dtypes.bfloat16)),
        "a.weight": codebook((4, 5), 16, np.float16),
        "a.norm": DenseTensor(rng.normal(size=(5,)).astype(np.float32)),
        "experts": codebook((2, 3, 7), 6, np.float32),
        "empty": DenseTensor(np.zeros((0, 3), np.float16)),
        "scale": DenseTensor(np.array(2.5, np.float32)),
        "head.weight": codebook((3, 5), 256, np.float16),
    }


def write(folder: Path, seed: int = 0, max_shard_bytes: int = 300) -> None:
    """What quantize/job.py does, with made-up results; a finished artifact of the same seed is left alone."""
    output_state(folder)
    with FolderLock(folder) as lock:
        resume_assembly(folder)
        if (folder / "trapetum.json").exists():
            with Artifact.open(folder) as old:
                if old.manifest["recipe"] == {"seed": seed}:
                    lock.release(remove=True)
                    return
        entries = {}
        for index, (name, tensor) in enumerate(tensors(seed).items()):
            parts = folder / WORK_FOLDER / PARTS
            found = read_part(parts, index, name)
            if found is not None:
                entries[name] = found.entry
                continue
            arrays = tensor.to_arrays()
            with PartWriter(parts, index, name, {s: (a.dtype, a.shape) for s, a in arrays.items()}) as part:
                flat = {s: a.reshape(matrix_shape(a.shape)) for s, a in arrays.items()}
                for row in range(tensor.rows):
                    part.write({s: a[row : row + 1] for s, a in flat.items()})
                draft = {"layout": tensor.layout, "shape": tensor.shape, "params": tensor.params()}
                entries[name] = part.finish({**draft, "scheme": {"name": "test"}, "relative_error": 0.125})
        seal = json.dumps({"event": "end", "sha256": hashlib.sha256(b"{}\n").hexdigest()})
        (folder / WORK_FOLDER / "run.jsonl").write_text(f"{{}}\n{seal}\n")
        header = {"tool_version": "0", "source": {"name": "x"}, "architecture": "y", "recipe": {"seed": seed}}
        manifest = build_manifest(header, entries)
        files: dict[str, bytes | Path] = {
            "config.json": artifact_config({"hidden_size": 5}, manifest),
            "README.md": b"card\n",
            "tokenizer.json": Path(__file__),
        }
        if seed:
            files["generation_config.json"] = b"{}\n"
        assemble(folder, manifest, files, max_shard_bytes=max_shard_bytes)
        lock.release(remove=True)


def content(folder: Path) -> dict[str, bytes]:
    """Every file under the folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def killed(folder: Path, seed: int, step: int) -> bool:
    """Write in a forked process that dies before its ``step``-th call; False if it ended before that."""
    pid = os.fork()
    if pid == 0:
        count = 0

        def patch(name: str) -> None:
            real = getattr(os, name)

            def call(*args: Any, **options: Any) -> Any:
                nonlocal count
                count += 1
                if count == step:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **options)

            setattr(os, name, call)

        for name in CALLS:
            patch(name)
        try:
            write(folder, seed)
        except BaseException as error:
            print(error, file=sys.stderr)
            os._exit(1)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise SystemExit(f"step {step}: the writer failed")
    return os.WIFSIGNALED(status)


def whole(folder: Path, allowed: list[int]) -> bool:
    """Check that the folder is one whole artifact of an allowed seed, or says that it is none."""
    try:
        with Artifact.open(folder) as art:
            seed = art.manifest["recipe"]["seed"]
            problems = [p for p in art.check_sums() if "not listed" not in p]
            if seed not in allowed or problems:
                raise SystemExit(f"{seed} {problems}")
            return True
    except FormatError as error:
        if "not finished" not in error.message and "no trapetum.json" not in error.message:
            raise SystemExit(str(error)) from error
        return False


def kill_everywhere(root: Path, stride: int, old_seed: int | None) -> dict[str, int]:
    """Kill at every ``stride``-th step (with an old artifact in place, where a seed is given) and compare."""
    new_seed = 0
    write(root / "expected", new_seed)
    expected = content(root / "expected")
    if old_seed is not None:
        write(root / "old", old_seed)
        (root / "old" / "mine.txt").write_text("the user's own")
        expected["mine.txt"] = b"the user's own"
    folder = root / "out"
    step, whole_seen = 1 - stride, 0
    while True:
        step += stride
        shutil.rmtree(folder, ignore_errors=True)
        if old_seed is not None:
            shutil.copytree(root / "old", folder)
        if not killed(folder, new_seed, step):
            break
        whole_seen += whole(folder, [new_seed] if old_seed is None else [old_seed, new_seed])
        write(folder, new_seed)
        if content(folder) != expected:
            raise SystemExit(f"step {step}: {sorted(content(folder))} are not {sorted(expected)}, or differ")
    # Killed again and again: every run must get further than the one before.
    shutil.rmtree(folder, ignore_errors=True)
    runs = 1
    while killed(folder, new_seed, 25):
        runs += 1
    if content(folder).keys() != expected.keys() - {"mine.txt"}:
        raise SystemExit("the often killed job left other files")
    return {"steps": step, "whole": whole_seen, "runs": runs}


def main() -> None:
    """Run one command."""
    command, folder = sys.argv[1], Path(sys.argv[2])
    if command == "kill":
        os.fsync = lambda fd: None  # what a kill leaves does not depend on it, and it takes most of the time
        stride, old = int(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else None
        print(json.dumps(kill_everywhere(folder, stride, old)))
        return
    try:
        write(folder)
    except TrapetumError as error:
        print(f"{type(error).__name__}: {error.message}")
        sys.exit(1)


if __name__ == "__main__":
    main()
