"""Every public name says what it is: modules, classes, functions and methods of the package, counted from the source.

What overrides a documented method, and properties' setters, need no second text.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("trapetum", "formats", "quantize", "export", "cli", "recipes")
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def sources(repository: Path) -> Iterator[Path]:
    """Modules of the package, each once: trapetum/quantize is a link to quantize."""
    for folder in FOLDERS:
        for path in sorted((repository / folder).rglob("*.py")):
            if not any(parent.is_symlink() for parent in path.parents):
                yield path


def public(tree: ast.Module) -> Iterator[tuple[str, Definition]]:
    """Definitions that a user may meet, with their names; nothing inside functions."""
    stack: list[tuple[str, ast.Module | ast.ClassDef]] = [("", tree)]
    while stack:
        prefix, node = stack.pop()
        for item in node.body:
            if isinstance(item, Definition) and not item.name.startswith("_"):
                yield f"{prefix}{item.name}", item
                if isinstance(item, ast.ClassDef):
                    stack.append((f"{prefix}{item.name}.", item))


def needs_none(item: Definition, documented: set[str], owner: bool) -> bool:
    """Whether an override takes its text from a base class, where a method of that name has one."""
    decorators = {d.attr for d in item.decorator_list if isinstance(d, ast.Attribute)}
    return "setter" in decorators or (owner and item.name in documented)


def test_all_public_names_are_documented(repository: Path) -> None:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sources(repository)}
    assert len(trees) > 150
    missing = [str(path) for path, tree in trees.items() if not ast.get_docstring(tree)]
    everything = [(path, name, item) for path, tree in trees.items() for name, item in public(tree)]
    documented = {item.name for _, name, item in everything if "." in name and ast.get_docstring(item)}
    for path, name, item in everything:
        if not ast.get_docstring(item) and not needs_none(item, documented, "." in name):
            missing.append(f"{path.relative_to(repository)}: {name}")
    total = len(trees) + len(everything)
    covered = 100 * (total - len(missing)) / total
    assert missing == [], f"{covered:.2f} % of {total} public names are documented"


def test_a_missing_docstring_is_seen() -> None:
    tree = ast.parse('class A:\n    "x"\n    def b(self): pass\n    def _c(self): pass\ndef d(): pass\n')
    found = {name: ast.get_docstring(item) for name, item in public(tree)}
    assert found == {"A": "x", "A.b": None, "d": None}
