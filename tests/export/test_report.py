"""The report: says what the manifest says, needs no network, survives hostile names, and looks right in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

import trapetum
from trapetum.cli.app import app
from trapetum.errors import FormatError, OutputError
from trapetum.export.report_figures import heat_map, lines
from trapetum.export.report_page import report_html, write_report
from trapetum.measured import measured_rows

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def artifact(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report") / "artifact"
    trapetum.quantize_model(demo_model, out, effort="fast")
    return out


class Page(HTMLParser):
    """Collects tags, attributes and text; remembers what is open, so that a missing end shows."""

    VOID = ("meta", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_one_page_says_what_the_manifest_says(artifact: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.html"
    result = CliRunner().invoke(app, ["report", str(artifact), "-o", str(out), "--json"])
    assert json.loads(result.stdout) == {"out": str(out), "bytes": out.stat().st_size}
    text = out.read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    manifest = json.loads((artifact / "trapetum.json").read_text())
    words = " ".join(page.text)
    totals = manifest["totals"]
    for figure in (f"{totals['bpw']:.3f}", f"{totals['quantized']['bpw']:.3f}", f"{totals['parameters']:,}"):
        assert figure in words
    worst = max(manifest["tensors"].items(), key=lambda item: item[1]["relative_error"] or 0)
    assert worst[0] in words
    assert f"{worst[1]['relative_error']:.3e}" in words
    assert "trapetum quantize books-2m --recipe 4bit-head8 --effort fast" in words
    assert "kmeans K=16" in words
    assert "Slowest tensors" in words
    assert "Not measured here" in words
    assert sum(tag == "svg" for tag, _ in page.seen) == 3
    assert (
        sum(tag == "circle" for tag, _ in page.seen) == 21
    )  # a dot a quantized tensor, one a layer and role
    for digest in manifest["source"]["files"].values():
        assert digest in words


def test_it_needs_nothing_from_elsewhere(artifact: Path) -> None:
    page = Page(report_html(artifact))
    assert not {"script", "link", "img", "iframe", "object", "image", "use"} & {tag for tag, _ in page.seen}
    attributes = {key for _, attrs in page.seen for key in attrs}
    assert not {"src", "href", "xlink:href", "style", "onload", "onclick"} & attributes
    sheet = "".join(page.text)
    assert "url(" not in sheet
    assert "@import" not in sheet
    policy = [a["content"] for t, a in page.seen if t == "meta" and a.get("http-equiv")]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'"]
    assert "prefers-color-scheme: dark" in sheet
    assert any(a.get("name") == "viewport" for t, a in page.seen if t == "meta")


def test_the_same_artifact_gives_the_same_page(artifact: Path) -> None:
    assert report_html(artifact) == report_html(artifact)


def test_measured_quality_is_shown(artifact: Path, tmp_path: Path) -> None:
    compare, verify = tmp_path / "compare.json", tmp_path / "verify.json"
    compare.write_text(json.dumps({"kl_mean": 0.0123456, "top1_agreement": 0.9, "tokens": 5000}))
    checks = [
        {"name": "integrity", "ok": True, "figure": 0.0, "detail": "all <checksums>"},
        {"name": "logits", "ok": False, "figure": 3.0, "detail": "no better than guessing"},
    ]
    verify.write_text(json.dumps({"ok": False, "checks": checks}))
    words = " ".join(Page(report_html(artifact, quality=[compare, verify])).text)
    assert "0.012346" in words
    assert "5,000" in words
    assert "passed: all <checksums>" in words
    assert "FAILED: no better than guessing" in words
    for content in (
        "[]",
        "{",
        '{"ppl": "low"}',
        '{"checks": [1]}',
        '{"checks": [{"name": 1}]}',
        "[" * 100_000,
    ):
        compare.write_text(content)
        with pytest.raises(FormatError, match="is no result of"):
            measured_rows([compare])
    with pytest.raises(FormatError, match="cannot be read"):
        measured_rows([tmp_path / "none.json"])


def test_real_results_are_taken(artifact: Path, demo_text: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(demo_text.read_text(encoding="utf-8")[:3000], encoding="utf-8")
    for command in (["perplexity", artifact], ["compare", artifact, artifact], ["verify", artifact]):
        options = [] if command[0] == "verify" else ["--text", str(text)]
        result = CliRunner().invoke(app, [*map(str, command), *options, "--json"])
        (tmp_path / "r.json").write_text(result.stdout)
        assert measured_rows([tmp_path / "r.json"])


def test_where_it_may_not_go(artifact: Path, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="lies inside the input"):
        write_report(artifact, artifact / "report.html")
    out = tmp_path / "r.html"
    out.write_text("mine")
    with pytest.raises(OutputError, match="exists"):
        write_report(artifact, out)
    assert out.read_text() == "mine"
    write_report(artifact, out, overwrite=True)
    with pytest.raises(OutputError, match="exists"):
        write_report(artifact, tmp_path, overwrite=True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(FormatError):
        write_report(tmp_path / "empty", tmp_path / "x.html")


def test_hostile_names_stay_text(artifact: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(artifact, tmp_path / "copy"))
    manifest = (copy / "trapetum.json").read_text()
    evil = "</title><script>alert(1)</script>"
    data = manifest.replace('"name": "books-2m"', json.dumps("name") + ": " + json.dumps(evil))
    data = re.sub(r'"role": "down"', '"role": "<b onload=x>"', data)
    (copy / "trapetum.json").write_text(data)
    (copy / "run.jsonl").write_text(
        '{"event": "tensor", "name": "<i>", "seconds": 1}\n{\n[]\n{"event": "tensor", "seconds": "x"}\n'
        '{"event": "start", "cpu": "<script>", "platform": "&"}\n' + "[" * 50_000 + "\n"
    )
    page = Page(report_html(copy))
    assert {"script", "b"} & {tag for tag, attrs in page.seen if attrs} == set()
    assert "script" not in {tag for tag, _ in page.seen}
    assert evil in " ".join(page.text)
    (copy / "run.jsonl").unlink()
    assert "Slowest" not in report_html(copy)


def test_figures_of_few_and_many_layers() -> None:
    assert heat_map({}, "", "", "") == lines({}, "", "") == ""
    for values in ([(0, 0.0)], [(5, 1e-9), (6, 1.0)], [(0, 0.5)], [(i, 0.1 + i) for i in range(200)]):
        svg = lines({"a": values}, "errors", "layer")
        Page(svg)
        numbers = [
            float(y) for _, y in re.findall(r"([\d.]+),([\d.-]+)", svg.split("points=")[1].split('"')[1])
        ]
        assert all(8 <= y <= 196.1 for y in numbers)
    wide = heat_map({("q", i): 4.0 for i in range(500)}, "bits", "layer", "bits")
    assert wide.count("<rect") == 500


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.slow
def test_in_a_browser(artifact: Path, tmp_path: Path) -> None:
    """A page that is as wide as a phone does not scroll sideways; the picture is no blank sheet; dark is dark."""
    page = tmp_path / "r.html"
    write_report(artifact, page)
    probe = tmp_path / "probe.html"  # a script of ours measures what the page itself may not run
    text = page.read_text(encoding="utf-8")
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    probe.write_text(
        text.replace(
            "</body>",
            "<script>const d = document.documentElement, b = getComputedStyle(document.body);"
            "d.dataset.got = [d.scrollWidth, innerWidth, b.backgroundColor, document.querySelectorAll('svg').length]"
            ".join(';')</script></body>",
        ),
        encoding="utf-8",
    )

    def chromium(*options: str) -> str:
        command = [str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += ["--disable-dev-shm-usage"]  # containers have 64 MB of it
        command += [f"--user-data-dir={tmp_path / 'profile'}", *options]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout

    for size, scheme, paper in (
        (390, 1, "rgb(255, 255, 255)"),
        (390, 0, "rgb(20, 23, 27)"),
        (1200, 1, "rgb(255, 255"),
    ):
        blink = f"--blink-settings=preferredColorScheme={scheme}"
        dom = chromium(blink, f"--window-size={size},900", "--dump-dom", probe.as_uri())
        found = re.search(r'data-got="([^"]*)"', dom)
        assert found is not None
        scroll, inner, colour, figures = found[1].split(";")
        assert int(scroll) <= int(inner)
        assert colour.startswith(paper)
        assert figures == "3"
    picture = tmp_path / "r.png"
    chromium(f"--screenshot={picture}", "--window-size=900,2400", page.as_uri())
    assert picture.stat().st_size > 50_000  # a blank sheet of this size has 10 kB
