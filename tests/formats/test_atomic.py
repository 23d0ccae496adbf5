"""Files are whole or absent, follow the umask, and a full disk is one sentence."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trapetum.errors import OutputError
from trapetum.formats.atomic import (
    FolderLock,
    atomic_file,
    disk_errors,
    refuse_overlap,
    remove_leftovers,
    require_space,
    write_atomic,
)
from trapetum.formats.regions import copy_file, copy_region


@pytest.fixture(params=[0o022, 0o077, 0o002])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_the_mode_follows_the_umask(tmp_path: Path, umask: int) -> None:
    write_atomic(tmp_path / "x", b"abc")
    copy_file(tmp_path / "x", tmp_path / "y")
    for name in "xy":
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_file_appears_at_the_end_only(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with atomic_file(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("replace", [True, False])
def test_a_file_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replace: bool
) -> None:
    """After a loss of power the name must not lead to an empty file: data, then the name, then the folder."""
    seen: list[tuple[str, bool]] = []

    def note(call: str) -> None:
        seen.append((call, (tmp_path / "x").exists()))

    monkeypatch.setattr(os, "fsync", lambda fd: note(os.readlink(f"/proc/self/fd/{fd}")))
    with atomic_file(tmp_path / "x", replace=replace) as file:
        file.write(b"abc")
    (data, named), *folders = seen
    assert data.endswith(".tmp")
    assert not named
    assert folders == [(str(tmp_path), True)]


def fail(written: int, kind: type[BaseException]) -> None:
    raise kind(written)


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_exception_leaves_the_old_file_and_nothing_else(tmp_path: Path, kind: type[BaseException]) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with pytest.raises(kind), atomic_file(path) as file:
        fail(file.write(b"new"), kind)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x"]


def test_an_existing_file_can_be_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write_atomic(path, b"1", replace=False)
    with pytest.raises(OutputError, match="exists"):
        write_atomic(path, b"2", replace=False)
    assert path.read_bytes() == b"1"
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_one_sentence_with_figures(tmp_path: Path, number: int) -> None:
    with pytest.raises(OutputError) as caught, atomic_file(tmp_path / "x", size=12345678):
        raise OSError(number, os.strerror(number))
    assert str(tmp_path / "x") in caught.value.message
    assert "12,345,678 bytes wanted" in caught.value.message
    assert "free" in caught.value.message
    assert os.listdir(tmp_path) == []


def test_other_failures_name_the_file_and_the_reason(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="No such file"):
        write_atomic(tmp_path / "absent" / "x", b"")
    (tmp_path / "d").mkdir()
    with pytest.raises(OutputError, match="Is a directory"):
        write_atomic(tmp_path / "d", b"")
    with pytest.raises(OutputError, match="Input/output error"), disk_errors("f"):
        raise OSError(errno.EIO, "Input/output error")
    assert os.listdir(tmp_path) == ["d"]


def test_space_is_checked_before_work(tmp_path: Path) -> None:
    require_space(tmp_path / "not" / "there", 1)
    with pytest.raises(OutputError, match="are needed"):
        require_space(tmp_path / "not" / "there", 1 << 60)


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path) -> None:
    dead, living = tmp_path / ".x.00000000.tmp", tmp_path / ".x.11111111.tmp"
    other, alike = tmp_path / ".y.22222222.tmp", tmp_path / ".x.notes.tmp"
    for path in (dead, living, other, alike):
        path.write_bytes(b"...")
    with open(living, "r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        write_atomic(tmp_path / "x", b"done")
        assert {p.name for p in tmp_path.iterdir()} == {"x", living.name, other.name, alike.name}
        assert remove_leftovers(tmp_path) == 1
    assert {p.name for p in tmp_path.iterdir()} == {"x", living.name, alike.name}


def test_copying_works_with_and_without_help_of_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = os.urandom(10_000)
    (tmp_path / "a").write_bytes(data)

    def refuse(*args: object) -> int:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    for stub in (None, refuse, lambda *args: 0):
        if stub is not None:
            monkeypatch.setattr(os, "copy_file_range", stub)
        with open(tmp_path / "a", "rb") as source, open(tmp_path / "b", "w+b") as target:
            copy_region(source.fileno(), 123, target.fileno(), 7, 9_000)
        assert (tmp_path / "b").read_bytes() == bytes(7) + data[123:9123]
        (tmp_path / "b").unlink()


HOLD = """
import sys, time
from trapetum.formats.atomic import FolderLock
with FolderLock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_lock_names_its_holder_and_dies_with_it(
    tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    process = start(sys.executable, "-c", HOLD, tmp_path / "out", stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    with (
        pytest.raises(OutputError, match=f"process {process.pid} on ") as caught,
        FolderLock(tmp_path / "out"),
    ):
        pass
    assert str(tmp_path / "out") in caught.value.message
    process.send_signal(signal.SIGKILL)
    process.wait()
    with FolderLock(tmp_path / "out") as lock:
        assert lock.note is None
        assert json.loads(lock.path.read_bytes())["pid"] == os.getpid()
        lock.release(remove=True)
    assert os.listdir(tmp_path / "out") == []


def test_locks_of_parts_do_not_exclude_each_other(tmp_path: Path) -> None:
    with FolderLock(tmp_path, "lock-1") as first, FolderLock(tmp_path, "lock-2") as second:
        assert first.path != second.path
        with pytest.raises(OutputError, match="in use"), FolderLock(tmp_path, "lock-1"):
            pass


def test_garbage_in_the_lock_file_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / ".trapetum").mkdir()
    (tmp_path / ".trapetum" / "lock").write_bytes(b"\xff{")
    with FolderLock(tmp_path) as lock:
        lock.path.write_bytes(b"[]")
        with pytest.raises(OutputError, match="another trapetum process"), FolderLock(tmp_path):
            pass


def test_a_file_system_without_locks_is_said_aloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with FolderLock(tmp_path) as lock:
        assert lock.note is not None
        assert "No locks available" in lock.note
    write_atomic(tmp_path / "x", b"1")
    assert (tmp_path / "x").read_bytes() == b"1"


def test_the_output_is_never_the_input(tmp_path: Path) -> None:
    source = tmp_path / "model"
    (source / "sub").mkdir(parents=True)
    (source / "w.safetensors").write_bytes(b"weights")
    (tmp_path / "link").symlink_to(source)
    os.link(source / "w.safetensors", tmp_path / "hard")
    (tmp_path / "soft").symlink_to(source / "w.safetensors")
    beside = tmp_path / "copy"
    beside.mkdir()
    os.link(source / "w.safetensors", beside / "w.safetensors")
    for output in (
        source,
        source / "out",
        source / "sub" / ".." / "out",
        tmp_path / "link",
        tmp_path / "link" / "out",
        tmp_path / "hard",
        tmp_path / "soft",
        beside,
        source / "w.safetensors",
    ):
        with pytest.raises(OutputError, match="input"):
            refuse_overlap(output, [tmp_path / "other", source])
    for output in (tmp_path / "out", tmp_path / "model-4bit", tmp_path / "model.cbk"):
        refuse_overlap(output, [source])
    with pytest.raises(OutputError, match="same file"):
        refuse_overlap(tmp_path / "hard", [source / "w.safetensors"])


def test_shared_holders_keep_out_who_wants_the_folder_alone(tmp_path: Path) -> None:
    with FolderLock(tmp_path, shared=True), FolderLock(tmp_path, shared=True):
        with pytest.raises(OutputError, match="in use by another"), FolderLock(tmp_path):
            pass
    with FolderLock(tmp_path), pytest.raises(OutputError), FolderLock(tmp_path, shared=True):
        pass


def test_waiting_names_the_holder_and_goes_on_when_it_is_gone(tmp_path: Path) -> None:
    first = FolderLock(tmp_path, "begin.lock")
    first.__enter__()
    said: list[str] = []

    def told(text: str) -> None:
        said.append(text)
        threading.Timer(0.2, first.release).start()

    with FolderLock(tmp_path, "begin.lock", wait=told):
        assert first._fd is None
    assert len(said) == 1
    assert f"process {os.getpid()}" in said[0]
