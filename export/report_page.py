"""The report of an artifact: one HTML page that holds everything it shows, for a browser without a network.

What it says comes from the artifact alone: sizes, schemes and errors from ``trapetum.json``, times from ``run.jsonl``.
Quality is in neither; it is shown where the caller names results (``trapetum.measured``). No script, no font, no
image from elsewhere: a policy in the page forbids them. Everything from files is escaped.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from trapetum.errors import OutputError, TrapetumError
from trapetum.export.report_figures import SERIES, bars, heat_map, lines
from trapetum.export.report_style import STYLE
from trapetum.formats.artifact import Artifact
from trapetum.formats.atomic import refuse_overlap, write_atomic
from trapetum.formats.manifest import RUN_LOG
from trapetum.measured import measured_rows
from trapetum.quantize.command import manifest_command
from trapetum.quantize.schemes import scheme_from_spec

__all__ = ["ReportTensor", "report_html", "write_report"]

_LISTED = 12  # tensors in the tables of the worst and the slowest
_LAYER = re.compile(r"\.(\d{1,5})\.")

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


@dataclass(frozen=True)
class ReportTensor:
    """What the report knows of one tensor.

    Parameters
    ----------
    name, role, scheme : str
    layer : int or None
        First number in the name.
    parameters, nbytes : int
    error : float or None
        Relative squared error; None for what is kept.
    seconds : float or None
        Wall time that its quantization took, where the log says so.
    """

    name: str
    role: str
    scheme: str
    layer: int | None
    parameters: int
    nbytes: int
    error: float | None
    seconds: float | None

    @property
    def bpw(self) -> float:
        """Stored bits a weight."""
        return 8.0 * self.nbytes / self.parameters if self.parameters else 0.0


def write_report(
    artifact: str | Path,
    out: str | Path = "report.html",
    *,
    quality: Sequence[str | Path] = (),
    overwrite: bool = False,
) -> Path:
    """Write the report of a finished artifact.

    Parameters
    ----------
    artifact : path
        The folder that ``quantize`` wrote.
    out : path
        The page; not inside the artifact, whose files are counted.
    quality : sequence of path
        JSON that ``perplexity``, ``compare`` or ``verify`` printed with ``--json``.
    overwrite : bool

    Returns
    -------
    Path
        ``out``.

    Raises
    ------
    FormatError
        If ``artifact`` is none, or a result holds nothing to show.
    OutputError
        If the page exists, lies in the artifact, or cannot be written.
    """
    out = Path(out)
    refuse_overlap(out, [artifact])
    if out.is_dir() or (out.exists() and not overwrite):
        raise OutputError(f"{out}: exists", hint="Give --overwrite to replace it, or another name with -o.")
    write_atomic(out, report_html(artifact, quality=quality).encode())
    return out


def report_html(artifact: str | Path, *, quality: Sequence[str | Path] = ()) -> str:
    """The page as text; see :func:`write_report`."""
    rows = measured_rows(quality)
    with Artifact.open(artifact) as opened:
        log = _log(opened.path / RUN_LOG)
        seconds = {e["name"]: e["seconds"] for e in log if e.get("event") == "tensor"}
        tensors = [_tensor(n, e, seconds.get(n)) for n, e in opened.manifest["tensors"].items()]
        manifest = opened.manifest
    source = manifest["source"]
    title = str(source.get("repo", source.get("name", opened.path.name)))
    sections = [
        _head(title, manifest, tensors),
        _quality(rows),
        _space(tensors),
        _errors(tensors),
        _bits(tensors),
        _slowest(tensors),
        _origin(manifest, log),
    ]
    return _page(f"{title}: quantized", sections)


def _tensor(name: str, entry: Mapping[str, Any], seconds: float | None) -> ReportTensor:
    layer = _LAYER.search(name)
    return ReportTensor(
        name,
        str(entry.get("role", "other")),
        _scheme(entry),
        int(layer[1]) if layer else None,
        math.prod(entry["shape"]),
        entry["bytes"],
        entry.get("relative_error"),
        seconds,
    )


def _scheme(entry: Mapping[str, Any]) -> str:
    """As the plan's table calls it; the bare name where another version of the tool made it."""
    try:
        return scheme_from_spec(entry["scheme"]).label
    except (TrapetumError, ValueError, KeyError, TypeError):
        return str(entry["scheme"].get("name", entry["layout"]))


def _log(path: Path) -> list[dict[str, Any]]:
    """Events of the run; lines that make no sense are left out: the page does not depend on them."""
    events = []
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    for line in text.splitlines():
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict):
            events.append(event)
    sound = [e for e in events if e.get("event") != "tensor"]
    return sound + [
        e
        for e in events
        if e.get("event") == "tensor"
        and isinstance(e.get("name"), str)
        and isinstance(e.get("seconds"), int | float)
    ]


# ---------------------------------------------------------------------------- sections
def _page(title: str, sections: Iterable[str]) -> str:
    body = "\n".join(filter(None, sections))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _head(title: str, manifest: Mapping[str, Any], tensors: Sequence[ReportTensor]) -> str:
    quantized = [t for t in tensors if t.error is not None]
    stored, count = sum(t.nbytes for t in tensors), sum(t.parameters for t in tensors)
    facts = [
        (_size(stored), "weights on disk"),
        (f"{_bpw(tensors):.3f}", "bits a weight, all"),
        (f"{_bpw(quantized):.3f}", "bits a weight, quantized"),
        (f"{2 * count / stored:.2f} x" if stored else "-", "smaller than 16 bits"),
    ]
    mean = _mean_error(tensors)
    if mean is not None:
        facts.append((f"{mean:.2e}", "mean relative error"))
    cells = "".join(f"<div><b>{escape(value)}</b><span>{escape(what)}</span></div>" for value, what in facts)
    recipe = manifest["recipe"].get("name", "?")
    return (
        f"<h1>{escape(title)}</h1>\n<p class='dim'>Architecture {escape(str(manifest.get('architecture')))}, recipe "
        f"{escape(str(recipe))}, {len(tensors):,} tensors, {len(quantized):,} of them quantized, "
        f"{count:,} weights.</p>\n"
        f'<div class="facts">{cells}</div>'
    )


def _quality(rows: Sequence[tuple[str, str]]) -> str:
    if not rows:
        return (
            "<h2>Quality</h2>\n<p>Not measured here. Give results with <code>--quality FILE</code>: what "
            "<code>trapetum compare MODEL ARTIFACT --text FILE --json</code> printed, or <code>perplexity</code> or "
            "<code>verify</code>.</p>"
        )
    body = [
        [escape(text), f'<span class="bad">{escape(value)}</span>' if "FAILED" in value else escape(value)]
        for text, value in rows
    ]
    return "<h2>Quality</h2>\n" + _table(["measured", "value"], body)


def _space(tensors: Sequence[ReportTensor]) -> str:
    groups = _groups(tensors, lambda t: t.role)
    rows = sorted(((r, sum(t.nbytes for t in g), g) for r, g in groups.items()), key=lambda item: -item[1])
    figure = bars(
        [(role, size, f"{_size(size)} · {_bpw(group):.2f} bits") for role, size, group in rows],
        "Bytes and bits a weight by role",
    )
    return f"<h2>Where the bytes are</h2>\n{_figure(figure, 'Stored bytes by role, codebooks and scales counted.')}"


def _errors(tensors: Sequence[ReportTensor]) -> str:
    lossy = [t for t in tensors if t.error is not None]
    if not lossy:
        return "<h2>Error</h2>\n<p>Nothing was changed: every tensor is stored exactly.</p>"
    layered = _groups([t for t in lossy if t.layer is not None], lambda t: t.role)
    series = {
        role: sorted(
            (layer, _mean_error(group) or 0.0)
            for layer, group in _groups(members, lambda t: t.layer).items()
            if layer is not None
        )
        for role, members in layered.items()
    }
    legend = "".join(f'<li><i class="s{i % SERIES}"></i>{escape(role)}</li>' for i, role in enumerate(series))
    figure = lines(series, "Relative squared error by layer and role", "layer")
    roles = [
        [
            escape(role),
            escape(", ".join(dict.fromkeys(t.scheme for t in group))),
            f"{len(group):,}",
            f"{_bpw(group):.3f}",
            f"{_mean_error(group):.3e}",
            f"{max(t.error or 0.0 for t in group):.3e}",
        ]
        for role, group in _groups(lossy, lambda t: t.role).items()
    ]
    worst = [
        [_name(t.name), escape(t.scheme), f"{t.bpw:.3f}", f"{t.error:.3e}"]
        for t in sorted(lossy, key=lambda t: (-(t.error or 0.0), t.name))[:_LISTED]
    ]
    caption = "Sum of squared differences over sum of squares; of several tensors of a role the mean by size."
    drawn = f'{_figure(figure, caption)}\n<ul class="legend">{legend}</ul>\n' if figure else ""
    return (
        f"<h2>Error by layer and role</h2>\n{drawn}"
        + _table(["role", "scheme", "tensors", "bits", "mean error", "largest"], roles, numbers=(2, 3, 4, 5))
        + f"<details><summary>The {len(worst)} largest errors</summary>\n"
        + _table(["tensor", "scheme", "bits", "error"], worst, numbers=(2, 3))
        + "</details>"
    )


def _bits(tensors: Sequence[ReportTensor]) -> str:
    matrices = [t for t in tensors if t.layer is not None and t.parameters > 0 and t.error is not None]
    cells = {
        (role, layer): _bpw(group)
        for (role, layer), group in _groups(matrices, lambda t: (t.role, t.layer)).items()
        if layer is not None
    }
    figure = heat_map(cells, "Stored bits a weight by layer and role", "layer", "bits")
    if not figure:
        return ""
    caption = "Stored bits a weight of quantized matrices; stronger is more."
    return f"<h2>How the bits are spent</h2>\n{_figure(figure, caption)}"


def _slowest(tensors: Sequence[ReportTensor]) -> str:
    timed = sorted((t for t in tensors if t.seconds is not None), key=lambda t: (-(t.seconds or 0.0), t.name))
    if not timed:
        return ""
    total = sum(t.seconds or 0.0 for t in timed)
    rows = [
        [_name(t.name), escape(t.scheme), f"{t.parameters:,}", f"{t.seconds:.2f}"] for t in timed[:_LISTED]
    ]
    return (
        "<h2>Slowest tensors</h2>\n"
        f"<p class='dim'>{total:.1f} s over {len(timed):,} tensors, as the run's log has it.</p>\n"
        + _table(["tensor", "scheme", "weights", "s"], rows, numbers=(2, 3))
    )


def _origin(manifest: Mapping[str, Any], log: Sequence[Mapping[str, Any]]) -> str:
    source = manifest["source"]
    command = manifest_command(manifest)
    note = ""
    if "recipe.json" in command:
        text = escape(json.dumps(manifest["recipe"], indent=1, ensure_ascii=False))
        note = f"<details><summary>recipe.json</summary><pre>{text}</pre></details>"
    files = source.get("files", {})
    hashes = (
        "\n".join(f"{digest}  {name}" for name, digest in files.items()) if isinstance(files, dict) else ""
    )
    origin = f"commit {source['commit']}" if "commit" in source else "a local folder"
    machines = sorted(
        {f"{e['cpu']}, {e['platform']}" for e in log if e.get("event") == "start" and "cpu" in e}
    )
    made = "".join(f"<p class='dim'>Made on {escape(m)}.</p>" for m in machines)
    return (
        f"<h2>Make it again</h2>\n<pre>{escape(command)}</pre>\n{note}"
        f"<p class='dim'>trapetum {escape(str(manifest.get('tool_version')))}, source: {escape(origin)}.</p>\n{made}"
        f"<details><summary>SHA-256 of the source's files</summary><pre>{escape(hashes)}</pre></details>"
    )


# ---------------------------------------------------------------------------- pieces
def _groups(tensors: Iterable[ReportTensor], key: Any) -> dict[Any, list[ReportTensor]]:
    groups: dict[Any, list[ReportTensor]] = {}
    for tensor in tensors:
        groups.setdefault(key(tensor), []).append(tensor)
    return groups


def _mean_error(tensors: Iterable[ReportTensor]) -> float | None:
    lossy = [t for t in tensors if t.error is not None]
    count = sum(t.parameters for t in lossy)
    return sum((t.error or 0.0) * t.parameters for t in lossy) / count if count else None


def _bpw(tensors: Iterable[ReportTensor]) -> float:
    members = list(tensors)
    count = sum(t.parameters for t in members)
    return 8.0 * sum(t.nbytes for t in members) / count if count else 0.0


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"


def _name(text: str) -> str:
    return f"\x00{escape(text)}"


def _figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}\n<figcaption>{escape(caption)}</figcaption></figure>"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """Cells are HTML; one that begins with NUL is a tensor's name."""

    def cell(tag: str, i: int, text: str) -> str:
        css = ' class="n"' if i in numbers else ' class="name"' if text.startswith("\x00") else ""
        return f"<{tag}{css}>{text.lstrip(chr(0))}</{tag}>"

    lines = ["<tr>" + "".join(cell("th", i, escape(t)) for i, t in enumerate(header)) + "</tr>"]
    lines += ["<tr>" + "".join(cell("td", i, t) for i, t in enumerate(row)) + "</tr>" for row in rows]
    return '<div class="scroll"><table>\n' + "\n".join(lines) + "\n</table></div>\n"
