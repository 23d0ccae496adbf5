"""What docs/batch.md shows is run: the Slurm script in two tasks at once, the list of jobs as it stands."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from trapetum.batch import BatchJob
from trapetum.quantize.job import quantize_model
from trapetum.quantize.shared_job import merge_parts


@pytest.fixture(scope="module")
def page(repository: Path) -> dict[str, str]:
    """Language -> the block of that language."""
    text = (repository / "docs" / "batch.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^```(\w+)\n(.*?)^```", text, re.DOTALL | re.MULTILINE))


@pytest.mark.slow
def test_the_slurm_script(
    page: dict[str, str], demo_model: Path, tmp_path: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    program = tmp_path / "bin" / "trapetum"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m trapetum "$@" --effort fast\n')
    program.chmod(0o755)
    script = tmp_path / "quantize.sh"
    script.write_text(page["bash"])
    out = tmp_path / "out"
    environment = {
        **os.environ,
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "MODEL": str(demo_model),
        "OUT": str(out),
        "SLURM_ARRAY_TASK_COUNT": "2",
        "SLURM_ARRAY_TASK_MIN": "1",
    }
    tasks = [
        start(
            "bash",
            script,
            env={**environment, "SLURM_ARRAY_TASK_ID": number},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in ("1", "2")
    ]
    for number, task in enumerate(tasks, 1):
        errors = task.communicate(timeout=300)[1]
        assert task.returncode == 0, errors
        assert f"part {number}/2, from the Slurm array" in errors
    merge_parts(out)
    quantize_model(demo_model, tmp_path / "whole", bits=4, effort="fast")
    assert (out / "SHA256SUMS").read_bytes() == (tmp_path / "whole" / "SHA256SUMS").read_bytes()


def test_the_list_of_jobs_is_valid(page: dict[str, str]) -> None:
    data = tomllib.loads(page["toml"])
    jobs = [BatchJob.model_validate({**data["defaults"], **entry}) for entry in data["jobs"]]
    assert [j.bits for j in jobs] == [4, 3]


def test_the_keys_are_those_of_a_job(repository: Path) -> None:
    text = (repository / "docs" / "batch.md").read_text(encoding="utf-8")
    named = re.search(r"^Keys: `([^`]+)`", text, re.MULTILINE)
    assert named is not None
    assert named[1].split() == list(BatchJob.model_fields)


def test_the_kubernetes_job_counts_its_parts(page: dict[str, str]) -> None:
    yaml = pytest.importorskip("yaml")
    spec = yaml.safe_load(page["yaml"])["spec"]
    container = spec["template"]["spec"]["containers"][0]
    assert spec["completionMode"] == "Indexed"
    assert container["env"] == [{"name": "TRAPETUM_PART_COUNT", "value": str(spec["completions"])}]
    assert json.dumps(container["command"][:2]) == '["trapetum", "quantize"]'
