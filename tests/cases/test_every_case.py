"""The outside catalogue of fault inputs, where it is at hand: every one through inspect, dry run, quantize and export.

A case says ``accept`` (the values are those of its oracle), ``reject`` (one line that names the culprit, exit 1, and
nothing written) or ``either``. What this version refuses although the catalogue also knows an answer stands in
:data:`REFUSED`, with the words that the refusal must hold: a refusal by name is right, a silent guess never.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from child import measured
from numpy.typing import NDArray
from typer.testing import CliRunner, Result

import trapetum
from trapetum.cli.app import app

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

REFUSED = {"open_30_stacked_experts__gptoss": "sinks is missing"}  # of which a gpt-oss layer is made, too
# Refused by name, says the catalogue, or decoded exactly: what is done, and said.
DECODED = {"open_19_already_quantized__mxfp4": "packed as mxfp4: 7 tensors are decoded exactly"}
# Not reproduced bit for bit by 16 entries a row: values as stored are compared to this relative squared error.
LOSSY = {"open_16_sign_symmetry": 1e-2}
AS_ROOT = (
    "open_09_missing_shard__permission"  # root reads a file of mode 000; that message has a test of its own
)
TINY_TENSORS = "open_02_header_length__many_200000"  # quantized by a test of its own: it is about counts
GIANT = "open_27_sparse_giant"
GGUF = "open_31_bad_gguf"
RSS_LIMIT = 1.5e9
PLAN = """
import sys
import trapetum
print(len(trapetum.quantize_model(sys.argv[1], sys.argv[2], dry_run=True).rows))
"""


def concerns(case_name: str) -> bool:
    """Whether a case has no test of its own."""
    return case_name not in (AS_ROOT, TINY_TENSORS) and not case_name.startswith((GIANT, GGUF))


def _run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def _verdict(name: str, expected: dict[str, Any]) -> tuple[str, list[str]]:
    if name in REFUSED:
        return "reject", [REFUSED[name]]
    if name in DECODED:
        return "accept", []
    return expected["verdict"], expected.get("must_mention", [])


def _logical(art: Any, name: str) -> NDArray[Any] | None:
    """A tensor of the oracle, which names what fused and numbered ones mean: Phi-3 with 4 heads and 2 pairs of 32."""
    if name in art:
        return art[name].dequantize()
    if match := re.fullmatch(r"(gate|up|down):(\d+)", name):
        weight = {"gate": "w1", "up": "w3", "down": "w2"}[match[1]]
        name = f"model.layers.0.block_sparse_moe.experts.{match[2]}.{weight}.weight"
        return art[name].dequantize() if name in art else None
    match = re.fullmatch(r"(.*)\.(q|k|v|gate|up)_proj\.weight", name)
    if match is None:
        return None
    fused = f"{match[1]}.{'qkv' if match[2] in 'qkv' else 'gate_up'}_proj.weight"
    if fused not in art:
        return None
    rows = art[fused].dequantize()
    half = len(rows) // 2
    cuts = {
        "q": (0, half),
        "k": (half, half + half // 2),
        "v": (half + half // 2, None),
        "gate": (0, half),
        "up": (half, None),
    }
    return rows[slice(*cuts[match[2]])]


def _values(name: str, artifact: Path, oracle: Path) -> list[str]:
    """Differences between an artifact and the exact values."""
    wrong = []
    with trapetum.open_artifact(artifact) as art, np.load(oracle) as exact:
        for key in exact.files:
            tensor = key.replace("|", "/")
            got, want = _logical(art, tensor), exact[key]
            if got is None:
                wrong.append(f"{tensor} is gone")
                continue
            if got.shape != want.shape or not np.isfinite(got).all():
                wrong.append(f"{tensor}: {got.shape}, {want.shape} expected, or not finite")
            elif name in LOSSY:
                error = (
                    np.square(got - want, dtype=np.float64).sum() / np.square(want, dtype=np.float64).sum()
                )
                if error > LOSSY[name]:
                    wrong.append(f"{tensor}: relative squared error {error:.3g}")
            elif not np.array_equal(got, want):
                wrong.append(f"{tensor}: largest difference {np.abs(got - want).max():.3g}")
    return wrong


def _accepted(name: str, case: Path, out: Path, dry: Result) -> list[str]:
    wrong = []
    written = {p.name: p.stat().st_size for p in out.glob("*.safetensors")}
    if json.loads(dry.stdout)["files"] != written:
        wrong.append("the dry run predicted other files or sizes")
    if (checked := _run("verify", out, "--source", case / "model")).exit_code:
        wrong.append(f"verify: {checked.stdout} {checked.stderr}")
    if (case / "oracle.npz").exists():
        wrong += _values(name, out, case / "oracle.npz")
    return wrong


def _refused(result: Result, mentions: list[str], out: Path, seconds: float) -> list[str]:
    """What is wrong with a refusal."""
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    wrong = [f"{word!r} is not in {lines}" for word in mentions if not any(word in line for line in lines)]
    if result.exit_code != 1 or len(lines) != 1 or "internal error" in result.stderr:
        wrong.append(f"exit code {result.exit_code}, {result.stderr!r}")
    if out.exists():
        wrong.append(f"left {sorted(p.name for p in out.iterdir())}")
    if seconds > 5:
        wrong.append(f"refused after {seconds:.0f} s")
    return wrong


def _check(case: Path, out: Path) -> tuple[str, list[str]]:
    """Everything about one case: (what happened, what is wrong with it)."""
    expected = json.loads((case / "expected.json").read_text(encoding="utf-8"))
    verdict, mentions = _verdict(case.name, expected)
    inspected = _run("inspect", case / "model")
    dry = _run("quantize", case / "model", "-o", out, "--dry-run", "--json")
    wrong = ["the dry run wrote something"] if out.exists() else []
    if "internal error" in inspected.stderr + dry.stderr:
        wrong.append(f"internal error: {inspected.stderr} {dry.stderr}")
    begun = time.process_time()
    result = _run("quantize", case / "model", "-o", out)
    happened = "reject" if result.exit_code else "accept"
    if dry.exit_code != result.exit_code:
        wrong.append(f"the dry run ends with {dry.exit_code}, the run with {result.exit_code}")
    if inspected.exit_code > result.exit_code:
        wrong.append(f"quantized, but not inspected: {inspected.stderr}")
    if verdict not in (happened, "either"):
        wrong.append(f"{verdict} expected: {result.stderr}")
    elif result.exit_code:
        wrong += _refused(result, mentions, out, time.process_time() - begun)
    else:
        wrong += _accepted(case.name, case, out, dry)
        if (said := DECODED.get(case.name, "")) not in result.stderr:
            wrong.append(f"{said!r} is not said")
    return happened, wrong


def test_the_verdict(
    case_name: str, make_case: Callable[[str], Path], tell: Callable[[tuple[Any, ...]], None], tmp_path: Path
) -> None:
    case = make_case(case_name)
    begun = time.process_time()
    happened, wrong = _check(case, tmp_path / "out")
    expected = json.loads((case / "expected.json").read_text(encoding="utf-8"))["verdict"]
    tell((case_name, expected, happened, time.process_time() - begun, "; ".join(wrong)))
    assert wrong == []


def test_symmetric_models_lose_the_same(make_case: Callable[[str], Path], tmp_path: Path) -> None:
    """W, -W and W with its rows exchanged; one thread and two give the same bytes."""
    case = make_case("open_16_sign_symmetry")
    errors = {}
    for folder in sorted(p for p in case.iterdir() if p.is_dir()):
        out = tmp_path / folder.name
        report = trapetum.quantize_model(folder, out, threads=2)
        again = trapetum.quantize_model(folder, tmp_path / f"{folder.name}-1", threads=1)
        for path in out.iterdir():
            if path.name != "run.jsonl":
                assert path.read_bytes() == (again.out / path.name).read_bytes(), path
        errors[folder.name] = report.errors
    assert len(errors) >= 2
    first, *others = errors.values()
    for other in others:
        assert other == pytest.approx(first, rel=1e-6)


def test_memory_does_not_grow_with_the_model(
    make_case: Callable[[str], Path], tmp_path: Path, cpu_limit: Any
) -> None:
    peaks = []
    for case in map(make_case, (f"{GIANT}__layers_2", f"{GIANT}__layers_8")):
        with cpu_limit(3):
            assert _run("inspect", case / "model").exit_code == 0
        out = tmp_path / case.name
        # Memory goes with the threads, 64 MiB each, and with those of BLAS: as many on every machine.
        command = ("-m", "trapetum", "quantize", str(case / "model"), "-o", str(out), "--effort", "fast")
        command += ("--threads", "2")
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "2"}
        peaks.append(measured(sys.executable, *command, env=environment).peak_bytes)
        with trapetum.open_artifact(out) as art:
            for name in art:
                last = art.shape(name)[0] - 1
                assert not art.load(name, slice(last, last + 1)).dequantize().any()
    assert peaks[1] < peaks[0] + 64e6  # four times the model: 0.9 and 3.5 GB
    assert max(peaks) < 700e6


def test_a_header_of_200_000_tensors_is_planned_in_seconds(
    make_case: Callable[[str], Path], tmp_path: Path, cpu_limit: Any
) -> None:
    model = make_case(TINY_TENSORS) / "model"
    with cpu_limit(60):
        assert _run("inspect", model).exit_code == 0
    used = measured(sys.executable, "-c", PLAN, str(model), str(tmp_path / "out"))
    assert int(used.stdout) > 200_000
    cpu_limit.check(used.cpu_seconds, 120)
    assert used.peak_bytes < RSS_LIMIT


def test_gguf_files(make_case: Callable[[str], Path], cpu_limit: Any) -> None:
    """``inspect`` shows what can be listed; ``verify`` passes what is right and nothing else."""
    case = make_case(GGUF)
    expected = json.loads((case / "expected.json").read_text(encoding="utf-8"))
    for verdict, code in (("accept", 0), ("reject", 3)):
        for name in expected[verdict]:
            checked = _run("verify", case / "gguf" / name)
            assert checked.exit_code == code, (name, checked.stdout, checked.stderr)
            assert code == 0 or "FAILED" in checked.stdout
    for name in (*expected["accept"], *expected["either"], *expected["reject"]):
        with cpu_limit(1):
            result = _run("inspect", case / "gguf" / name)
        assert result.exit_code == 0 or name in result.stderr
        assert result.exit_code == 0 or name not in expected["accept"]
        assert "internal error" not in result.stderr
