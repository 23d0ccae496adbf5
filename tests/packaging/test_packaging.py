"""The wheel must hold what the tree holds: package list, links, data files, and an install that runs elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

LINKED = ("quantize", "export", "formats", "cli", "recipes")


def packages_in_tree(root: Path) -> set[str]:
    found = set()
    for top in ("trapetum", *LINKED):
        prefix = "" if top == "trapetum" else "trapetum."
        for init in (root / top).rglob("__init__.py"):
            relative = init.parent.relative_to(root)
            if top == "trapetum" and len(relative.parts) > 1 and relative.parts[1] in LINKED:
                continue
            found.add(prefix + ".".join(relative.parts))
    return found


def test_every_package_is_listed_for_the_wheel(repository: Path) -> None:
    settings = tomllib.loads((repository / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    assert set(settings["packages"]) == packages_in_tree(repository)
    assert set(settings["package-dir"]) == {f"trapetum.{name}" for name in LINKED}


@pytest.mark.parametrize("name", LINKED)
def test_links_point_at_the_real_folders(repository: Path, name: str) -> None:
    link = repository / "trapetum" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"


def test_version_is_stated_once_and_the_same(repository: Path) -> None:
    import trapetum

    project = tomllib.loads((repository / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["version"] == trapetum.__version__


@pytest.mark.network
def test_built_wheel_runs_from_another_folder(repository: Path, tmp_path: Path) -> None:
    """sdist -> wheel -> clean venv -> quantize the demo model from a folder that is not the source tree."""
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(tmp_path / "dist"), str(repository)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    wheel = next((tmp_path / "dist").glob("*.whl"))
    held = set(zipfile.ZipFile(wheel).namelist())
    for name in packages_in_tree(repository):
        assert name.replace(".", "/") + "/__init__.py" in held
    for recipe in (repository / "recipes").glob("*.toml"):
        assert f"trapetum/recipes/{recipe.name}" in held
    assert "trapetum/py.typed" in held

    venv.create(tmp_path / "venv", with_pip=True)
    binary = tmp_path / "venv" / "bin"
    subprocess.run(
        [str(binary / "pip"), "install", "--quiet", str(wheel)], check=True, capture_output=True, text=True
    )
    work = tmp_path / "elsewhere"
    work.mkdir()
    model = repository / "models" / "books-2m"
    for arguments in (
        ["--version"],
        ["quantize", str(model), "-o", "artifact", "--bits", "4"],
        ["export", "artifact", "--format", "cbk", "-o", "cbk"],
        ["verify", "artifact", "--source", str(model)],
        ["run", "cbk/model.cbk", "--prompt", "The old house", "-n", "4"],
    ):
        done = subprocess.run(
            [str(binary / "trapetum"), *arguments], cwd=work, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    assert (work / "cbk" / "model.cbk").stat().st_size > 1_000_000
