"""README.md of an artifact: what it was made from, how, and what was lost. A pure function of the job's input.

The source's card is read for what must survive (licence, base model, languages); values are written back as quoted
strings, so that the language code ``no`` stays text where YAML would make it false.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from trapetum.quantize.report import Report

__all__ = ["model_card", "read_front_matter"]

_CARRIED = ("license", "license_name", "license_link", "language", "base_model")
_MOST_BYTES = 1 << 20


def read_front_matter(folder: Path) -> dict[str, str | list[str]]:
    """The carried keys of ``README.md`` in a model folder; plain scalars and lists of them, all as text.

    Anything else in the file, and a file that is not UTF-8, is left alone: a card never stops a job.
    """
    try:
        with open(folder / "README.md", "rb") as file:
            text = file.read(_MOST_BYTES).decode("utf-8", "replace")
    except OSError:
        return {}
    match = re.match(r"\ufeff?---\r?\n(.*?)\r?\n---\s", text + "\n", re.DOTALL)
    found: dict[str, str | list[str]] = {}
    key = None
    for line in match[1].splitlines() if match else []:
        item = re.fullmatch(r"\s*-\s+(.+)", line)
        pair = re.fullmatch(r"([\w-]+):\s*(.*)", line)
        if pair:
            key = pair[1] if pair[1] in _CARRIED else None
            if key and pair[2]:
                inside = re.fullmatch(r"\[(.*)\]", pair[2].strip())
                found[key] = (
                    [_plain(p) for p in inside[1].split(",") if p.strip()] if inside else _plain(pair[2])
                )
        elif item and key:
            before = found.setdefault(key, [])
            if isinstance(before, list):
                before.append(_plain(item[1]))
    return {k: v for k, v in found.items() if v}


def _plain(text: str) -> str:
    return text.strip().strip("'\"").strip()


def model_card(
    report: Report, title: str, source: Mapping[str, object], carried: Mapping[str, str | list[str]]
) -> bytes:
    """The card as UTF-8 bytes.

    Parameters
    ----------
    report : Report
        Of the finished tensors.
    title : str
        Name of the source model.
    source : mapping
        What the manifest says of the source; ``repo`` and ``commit`` are shown where known.
    carried : mapping
        From :func:`read_front_matter`.
    """
    head: dict[str, str | list[str]] = {"library_name": "trapetum", **carried}
    if isinstance(source.get("repo"), str):
        head["base_model"] = str(source["repo"])
        head["base_model_relation"] = "quantized"
    head["tags"] = ["trapetum", "quantized"]
    plan, recipe = report.plan, report.plan.recipe
    origin = f"`{source['repo']}` at commit `{source['commit']}`" if "repo" in source else f"`{title}`"
    rows = [
        f"| {r.role} | {r.scheme} | {r.tensors} | {r.parameters:,} | {r.bpw:.3f} | "
        f"{'exact' if r.relative_error is None else f'{r.relative_error:.3e}'} |"
        for r in report.roles()
    ]
    worst = [f"* `{name}`: {error:.3e}" for name, error in report.worst(3)]
    lines = [
        "---",
        *(f"{k}: {json.dumps(v, ensure_ascii=False)}" for k, v in head.items()),
        "---",
        "",
        f"# {title}, {plan.quantized_bpw:.2f} bits a weight where quantized",
        "",
        f"Quantized by trapetum from {origin} with recipe `{recipe.name}`: {plan.parameters:,} parameters at "
        f"{plan.bpw:.3f} stored bits each over all tensors, {plan.quantized_bpw:.3f} over the quantized ones "
        "(codebooks counted).",
        "",
        "| role | scheme | tensors | parameters | bits a weight | relative squared error |",
        "|---|---|---:|---:|---:|---:|",
        *rows,
        "",
        "The error is the sum of squared differences over the sum of squared weights. It says how well the weights are",
        "kept, not how well the model answers: measure that with `trapetum compare` or `trapetum perplexity`.",
        *(["", "Largest errors:", "", *worst] if worst else []),
        "",
        "## Use",
        "",
        "```python",
        "import trapetum",
        "",
        'model = trapetum.load("PATH")            # this folder; runs on the CPU, no PyTorch',
        'weight = trapetum.open_artifact("PATH")["TENSOR"].dequantize()',
        "```",
        "",
        "`trapetum export PATH --format hf` gives a dense folder for other programs; `trapetum.json` lists every",
        "tensor with its scheme, error and checksum.",
    ]
    return ("\n".join(lines) + "\n").encode()
