"""Folders that appear whole: what a killed export left is swept, what a living one writes is not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from trapetum.export.plan import new_folder


def names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


def write(out: Path, text: str) -> None:
    with new_folder(out) as folder:
        (folder / "file").write_text(text)


def interrupted(out: Path) -> None:
    with new_folder(out):
        assert (out / "file").read_text() == "older"  # put back before anything else
        raise KeyboardInterrupt


def test_leftovers_go_and_an_export_that_was_moved_aside_comes_back(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (tmp_path / ".out.0123abcd.tmp").mkdir()
    (tmp_path / ".out.0123abcd.old").mkdir()
    (tmp_path / ".out.0123abcd.old" / "file").write_text("older")
    (tmp_path / ".other.0123abcd.tmp").mkdir()
    (tmp_path / ".out.txt").write_text("mine")
    with pytest.raises(KeyboardInterrupt):
        interrupted(out)
    assert names(tmp_path) == {"out", ".other.0123abcd.tmp", ".out.txt"}
    write(out, "new")
    assert (out / "file").read_text() == "new"
    assert names(tmp_path) == {"out", ".other.0123abcd.tmp", ".out.txt"}


def test_a_folder_takes_the_place_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    write(tmp_path / "out", "new")
    assert (tmp_path / "out" / "file").read_text() == "new"
    assert names(tmp_path) == {"out"}


def test_a_living_export_is_left_alone(tmp_path: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
    script = (
        "import sys\nfrom pathlib import Path\nfrom trapetum.export.plan import new_folder\n"
        "with new_folder(Path(sys.argv[1])) as folder:\n"
        "    (folder / 'file').write_text('theirs'); print('ready', flush=True); sys.stdin.read()\n"
    )
    command = (sys.executable, "-c", script, tmp_path / "out")
    process = start(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == "ready\n"
    write(tmp_path / "out", "ours")
    assert len([n for n in names(tmp_path) if n.endswith(".tmp")]) == 1
    process.stdin.close()
    process.stdout.read()
    assert process.wait(30) == 0
    assert (tmp_path / "out" / "file").read_text() == "theirs"
    assert names(tmp_path) == {"out"}
