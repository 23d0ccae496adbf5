"""Imports point down: cli -> export -> quantize -> runtime -> kernels, models -> formats -> tensors -> errors.

What a module imports when it is loaded counts; imports inside functions are how upper things are reached lazily.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ORDER = ("cli", "export", "quantize", "runtime", "kernels", "models", "formats", "tensors", "errors")
RANK = {name: -i for i, name in enumerate(ORDER)} | {"models": -ORDER.index("kernels")}


def modules(repository: Path) -> Iterator[tuple[str, Path]]:
    """(layer, file) of every module of a layer."""
    for layer in ORDER:
        for root in (repository / layer, repository / "trapetum" / layer):
            if root.is_dir() and not root.is_symlink():
                for path in sorted(root.rglob("*.py")):
                    yield layer, path
    yield "errors", repository / "trapetum" / "errors.py"


def imported(path: Path) -> Iterator[str]:
    """Modules of this package that are imported when the file is; for types only does not count."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trapetum"):
            yield str(node.module)
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.startswith("trapetum"))


def test_imports_point_down(repository: Path) -> None:
    upward = [
        f"{path.relative_to(repository)}: {name}"
        for layer, path in modules(repository)
        for name in imported(path)
        if RANK.get(name.partition(".")[2].partition(".")[0], RANK[layer]) > RANK[layer]
    ]
    assert upward == []


def test_an_import_upward_would_be_seen(tmp_path: Path) -> None:
    (tmp_path / "formats").mkdir()
    (tmp_path / "trapetum").mkdir()
    (tmp_path / "trapetum" / "errors.py").write_text("")
    (tmp_path / "formats" / "x.py").write_text("from trapetum.quantize.plan import Plan\n")
    found = [name for _, path in modules(tmp_path) for name in imported(path)]
    assert found == ["trapetum.quantize.plan"]
    assert RANK["quantize"] > RANK["formats"]
