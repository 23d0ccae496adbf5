"""What the pages say is true: commands run, options exist, links lead somewhere, quoted errors are in the source.

Commands of the README, the tutorial, the recipes and others run in order, in an empty folder, with the demo model
behind every name of a model and the loopback Hub behind Hub ids. The few that need another machine are parsed only.
"""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from trapetum.cli.app import app

# The client uploads large files in a way that its own HTTP library announces to drop.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content:DeprecationWarning")

DOCS = (
    *("tutorial", "recipes", "cli", "faq", "hub", "batch", "architecture", "architectures"),
    *("quality", "benchmarks", "design"),
)
PAGES = ("README.md", "SECURITY.md", "CONTRIBUTING.md", *(f"docs/{n}.md" for n in DOCS))
RUN = ("README.md", "docs/tutorial.md", "docs/recipes.md", "docs/hub.md", "docs/batch.md", "docs/cli.md")
# Words of a command that say it cannot run here, and why.
ELSEWHERE = {
    "HOST": "another machine",
    "$": "a script's variables; tests/test_batch_page.py runs that script",
}
BLOCK = re.compile(
    r"^```(?P<kind>\w*)\n(?P<body>.*?)^```|(?P<indented>(?:^    [^\n]*\n)+)", re.DOTALL | re.MULTILINE
)


def blocks(text: str) -> list[tuple[str, str]]:
    """(kind, body) of fenced and indented blocks."""
    return [
        (m["kind"], m["body"])
        if m["body"] is not None
        else ("indented", re.sub("(?m)^    ", "", m["indented"]))
        for m in BLOCK.finditer(text)
    ]


def commands(text: str) -> list[str]:
    """Lines that begin with the program's name, comments cut."""
    lines = [
        line.removeprefix("$ ")
        for kind, body in blocks(text)
        if kind in ("sh", "bash", "indented")
        for line in body.replace("\\\n", " ").splitlines()
    ]
    return [
        re.sub(r"\s+#\s.*", "", line) for line in lines if line.startswith("trapetum ") and "[" not in line
    ]


def page(repository: Path, name: str) -> str:
    return (repository / name).read_text(encoding="utf-8")


def parse(words: list[str]) -> None:
    """Whether the command line knows these options; nothing is run."""
    group: Any = typer.main.get_command(app)
    command = group.commands[words[0]]
    command.make_context(words[0], list(words[1:]), resilient_parsing=False)


@pytest.mark.parametrize("name", PAGES)
def test_options_exist(repository: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("some.txt", "valid.txt", "calibration.txt"):
        (tmp_path / file).write_text("text")
    for line in commands(page(repository, name)):
        words = shlex.split(line.partition(" > ")[0], comments=True)[1:]
        if words[0].startswith("-"):
            continue
        words = [w.replace("${SLURM_CPUS_PER_TASK:-1}", "1") for w in words]
        parse(words)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
def test_commands_run(
    repository: Path,
    name: str,
    demo_model: Path,
    demo_text: Path,
    tmp_path: Path,
    hub: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub.commit("org/name", {p.name: p.read_bytes() for p in demo_model.iterdir() if p.is_file()})
    work = tmp_path / "work"
    (work / "path" / "to").mkdir(parents=True)
    monkeypatch.chdir(work)
    for link in ("path/to/model", "MODEL"):
        (work / link).symlink_to(demo_model)
    for file in ("some.txt", "valid.txt", "calibration.txt"):
        (work / file).write_text(demo_text.read_text(encoding="utf-8")[:8000], encoding="utf-8")
    text = page(repository, name)
    for kind, body in blocks(text):
        if kind == "toml" and "[[rules]]" in body:
            (work / "mine.toml").write_text(body)
    if name == "docs/hub.md":
        assert (
            CliRunner().invoke(app, ["quantize", "MODEL", "-o", "ARTIFACT", "--effort", "fast"]).exit_code
            == 0
        )
    ran: set[str] = set()
    for line in commands(text):
        if line in ran or any(word in line for word in ELSEWHERE):
            continue
        if "create-pr" in line:
            hub.commit("org/name", {".gitattributes": b""})  # a repository that exists, without other weights
        if "push" in line and name == "docs/hub.md" and "create-pr" not in line:
            hub.commits.pop("org/name", None)
        command, _, target = line.partition(" > ")
        words = shlex.split(command)[1:]
        if words == ["--install-completion"]:
            continue
        if words[0] == "quantize" and "--effort" not in words:
            words += ["--effort", "fast"]  # the same command, sooner
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, (line, result.output[-2000:])
        if target:
            Path(target).write_text(result.stdout)
        ran.add(line)
    assert ran or name == "docs/cli.md"
    shutil.rmtree(work, ignore_errors=True)


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(repository: Path, name: str) -> None:
    where = (repository / name).parent
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page(repository, name)):
        if not target.startswith(("http:", "https:")):
            assert (where / target).exists(), target


def test_every_page_is_linked_from_the_readme(repository: Path) -> None:
    text = page(repository, "README.md")
    pages = {p.name for p in (repository / "docs").glob("*.md")} - {"log.md"}
    assert {n for n in pages if f"docs/{n}" not in text} == set()


def test_quoted_errors_are_those_of_the_source(repository: Path) -> None:
    folders = ("trapetum", "formats", "quantize", "export", "cli")
    source = "".join(
        p.read_text(encoding="utf-8") for f in folders for p in sorted((repository / f).rglob("*.py"))
    )
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # sentences that are written over several lines
    quoted = [
        message
        for line in page(repository, "docs/faq.md").splitlines()
        if line.startswith("| `")
        for message in re.findall(r"`([^`]+)`", line.split("|")[1])
    ]
    assert len(quoted) > 25
    assert [message for message in quoted if message not in source] == []


def test_every_command_is_on_the_page_of_the_command_line(repository: Path) -> None:
    text = page(repository, "docs/cli.md")
    group: Any = typer.main.get_command(app)
    assert [name for name in group.commands if f"`{name}" not in text] == []


@pytest.mark.slow
def test_the_python_of_the_readme_runs(
    repository: Path, demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "path" / "to").mkdir(parents=True)
    (tmp_path / "path" / "to" / "model").symlink_to(demo_model)
    monkeypatch.chdir(tmp_path)
    (code,) = [body for kind, body in blocks(page(repository, "README.md")) if kind == "python"]
    scope: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), scope)
    assert scope["logits"].shape == (3, 2048)
    assert len(scope["new_ids"]) >= 16
