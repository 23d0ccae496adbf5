"""The outside catalogue of faults, where it is at hand: its inputs are made when a test asks for them.

At the end of a run a table says what became of each case.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Row = tuple[str, str, str, float, str]  # case, expected, happened, CPU seconds, what is wrong
_ROWS = pytest.StashKey[list[Row]]()


def shared_cases() -> Path:
    """Where the catalogue would be."""
    root = Path(__file__).resolve().parents[2]
    return Path(os.environ.get("TRAPETUM_SHARED", root.parent / "shared")) / "cases"


def case_names() -> list[str]:
    """Every input of the catalogue, in the words of its own list of variants; none where it is absent."""
    folder = shared_cases()
    script = folder / "make_all.py"
    if not script.is_file():
        return []
    tree = ast.parse(script.read_text(encoding="utf-8"))
    (table,) = [
        n for n in tree.body if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") == "VARIANTS"
    ]
    scope: dict[str, dict[str, list[str]]] = {}
    exec(compile(ast.Module([table], []), str(script), "exec"), scope)
    names = []
    for path in sorted(folder.glob("open_*.py")):
        for variant in scope["VARIANTS"].get(path.stem[:7], [""]):
            words = variant.replace("--kind", "").replace("--", "").split()
            names.append("__".join([path.stem, "_".join(words)] if words else [path.stem]))
    return [n for n in names if not n.startswith("open_32")]  # a server, not a generator


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``case_name``: the inputs of the catalogue that concern the module, as its function of that name says."""
    if "case_name" in metafunc.fixturenames:
        names = [n for n in case_names() if metafunc.module.concerns(n)]
        absent = [
            pytest.param("", marks=pytest.mark.skip(reason="the catalogue is not beside the source tree"))
        ]
        metafunc.parametrize("case_name", names or absent)


@pytest.fixture(scope="session")
def make_case(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a case: ``model`` is the input, ``expected.json`` the verdict, ``oracle.npz`` the exact values."""
    out = tmp_path_factory.mktemp("catalogue")
    made: set[str] = set()

    def make(name: str) -> Path:
        script = name.partition("__")[0]
        if script not in made:
            command = [sys.executable, "-B", str(shared / "cases" / "make_all.py"), str(out), script]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            made.add(script)
        return out / name

    return make


@pytest.fixture
def tell(request: pytest.FixtureRequest) -> Callable[[Row], None]:
    """Add a row to the table."""
    rows = request.config.stash.setdefault(_ROWS, [])
    return rows.append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    rows = config.stash.get(_ROWS, [])
    if not rows:
        return
    wrong = sum(bool(row[4]) for row in rows)
    terminalreporter.section(
        f"catalogue: {len(rows)} inputs, {len(rows) - wrong} verdicts right, {wrong} wrong"
    )
    for name, expected, happened, seconds, fault in sorted(rows):
        terminalreporter.write_line(
            f"{name:<44} {expected:<7} {happened:<7} {seconds:6.2f} s  {fault.partition(chr(10))[0][:120] or 'right'}"
        )
