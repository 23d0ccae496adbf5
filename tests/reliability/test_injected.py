"""A disk that fails at any call: one sentence, no half file under a final name, and a next run with the same bytes."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import trapetum
from trapetum.errors import FormatError, TrapetumError
from trapetum.formats.artifact import Artifact
from trapetum.formats.atomic import WORK_FOLDER

CALLS = (
    "replace",
    "fsync",
    "mkdir",
    "pwrite",
    "pwritev",
    "ftruncate",
    "copy_file_range",
    "unlink",
    "open",
    "write",
)
REASONS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EACCES, errno.EROFS, errno.EMFILE)
OPTIONS: dict[str, Any] = {"effort": "fast", "threads": 1, "max_shard_size": 150_000}


class Injector:
    """Counts calls that concern the output; one of them fails, and perhaps all after it."""

    def __init__(self, step: int, number: int, folder: Path, lasting: bool) -> None:
        self.step, self.number, self.folder, self.lasting = step, number, str(folder), lasting
        self.count = 0
        self.hit = False

    @contextmanager
    def active(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name in CALLS:
                if hasattr(os, name):
                    patch.setattr(os, name, self._wrapped(name, getattr(os, name)))
            yield

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            makes = name != "open" or (len(args) > 1 and args[1] & os.O_CREAT)
            if makes and self._ours(args[0] if args else None):
                self.count += 1
                lasting = self.hit and self.lasting and name != "unlink"  # a full disk still lets one remove
                if self.count == self.step or lasting:
                    self.hit = True
                    raise OSError(self.number, os.strerror(self.number), str(args[0]))
            return real(*args, **options)

        return call

    def _ours(self, where: Any) -> bool:
        if isinstance(where, int):
            try:
                where = os.readlink(f"/proc/self/fd/{where}")
            except OSError:
                return False
        return str(where).startswith(self.folder)


@pytest.fixture(scope="module")
def whole(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "out"
    trapetum.quantize_model(small_model, out, **OPTIONS)
    return out


def calls_of_a_run(model: Path, folder: Path) -> int:
    """How many calls an undisturbed run makes."""
    watch = Injector(0, 0, folder, False)
    with watch.active():
        trapetum.quantize_model(model, folder / "out", **OPTIONS)
    return watch.count


@pytest.mark.parametrize(("first", "more"), [(3, 9), pytest.param(7, 40, marks=pytest.mark.slow)])
def test_a_call_fails_once(
    first: int,
    more: int,
    small_model: Path,
    whole: Path,
    tmp_path: Path,
    identity: Callable[[Path], dict[str, bytes]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    total = calls_of_a_run(small_model, tmp_path / "count")
    assert total > 50
    rng = random.Random(more)
    steps = sorted({*range(1, first + 1), *rng.sample(range(first + 1, total + 1), min(more, total - first))})
    failed, messages = 0, []
    for step in steps:
        folder = tmp_path / str(step)
        out = folder / "out"
        broken = Injector(step, REASONS[step % len(REASONS)], folder, lasting=step % 2 == 0)
        try:
            with broken.active():
                trapetum.quantize_model(small_model, out, **OPTIONS)
        except TrapetumError as error:
            failed += 1
            messages.append(error.message)
        assert broken.hit
        try:
            with Artifact.open(out) as artifact:
                assert artifact.check_sums() == []
        except FormatError:
            pass
        assert not [p for p in out.glob("*.tmp") if broken.number not in (errno.EACCES, errno.EROFS)]
        trapetum.quantize_model(small_model, out, overwrite=True, **OPTIONS)
        assert identity(out) == identity(whole), step
        assert not (out / WORK_FOLDER).exists()
    assert failed > len(steps) // 3
    assert [m for m in messages if "\n" in m or str(tmp_path) not in m] == []
    with capsys.disabled():
        print(
            f"\nfaults injected: {len(steps)} of {total} calls failed, {failed} ended in one sentence, nothing lost"
        )


@pytest.mark.parametrize("count", [4, pytest.param(12, marks=pytest.mark.slow)])
@pytest.mark.parametrize("format", ["cbk", "gguf", "hf"])
def test_exports(format: str, count: int, small_model: Path, whole: Path, tmp_path: Path) -> None:
    good = tmp_path / "good"
    name = "x.gguf" if format == "gguf" else "x"
    watch = Injector(0, 0, good, False)
    with watch.active():
        trapetum.export_artifact(whole, format, good / name)
    rng = random.Random(2)
    refused: list[str] = []
    for step in rng.sample(range(1, watch.count + 1), min(count, watch.count)):
        folder = tmp_path / f"{format}-{step}"
        broken = Injector(step, errno.ENOSPC, folder, lasting=True)
        final = folder / name
        try:
            with broken.active():
                trapetum.export_artifact(whole, format, final)
        except TrapetumError as error:
            refused.append(error.message)
            if final.exists():  # a GGUF may be whole, only its list of sums is missing
                assert final.read_bytes() == (good / name).read_bytes()
        trapetum.export_artifact(whole, format, final, overwrite=True)
        again = {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        assert again == {p.relative_to(good): p.read_bytes() for p in good.rglob("*") if p.is_file()}
    assert len(refused) >= count // 2
    assert [m for m in refused if "\n" in m or "the disk is full" not in m] == []
