"""A list of jobs runs to its end, says what became of each, and begins where it stopped."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from trapetum.batch import BatchJob, read_jobs, run_batch
from trapetum.cli.app import app
from trapetum.errors import RecipeError
from trapetum.quantize.job import quantize_model

JOB = '[[jobs]]\nmodel = "m"\nout = "o"\n'


@pytest.fixture
def jobs(tmp_path: Path, demo_model: Path) -> Path:
    """Two good jobs around one whose model is not there."""
    path = tmp_path / "jobs.toml"
    text = '[defaults]\neffort = "fast"\n'
    for model, out, more in (
        (demo_model, "a", 'export = ["cbk"]'),
        ("./missing", "b", ""),
        (demo_model, "c", "bits = 3"),
    ):
        text += f"[[jobs]]\nmodel = {json.dumps(str(model))}\nout = 'made/{out}'\n{more}\n"
    path.write_text(text)
    return path


def call(path: Path, *options: str) -> tuple[int, Any]:
    result = CliRunner().invoke(app, ["batch", str(path), "--json", *options])
    return result.exit_code, json.loads(result.stdout)


def test_goes_on_after_a_failure_and_resumes(jobs: Path, tmp_path: Path) -> None:
    code, data = call(jobs)
    assert code == 1
    assert [j["status"] for j in data["jobs"]] == ["done", "failed", "done"]
    assert data["failed"] == 1
    assert "missing: there is no such file or folder" in data["jobs"][1]["error"]
    assert data["jobs"][0]["bpw"] > data["jobs"][2]["bpw"] > 3
    assert data["jobs"][0]["exports"] == [str(tmp_path / "made" / "a-cbk")]
    assert sorted(p.name for p in (tmp_path / "made").iterdir()) == ["a", "a-cbk", "c"]
    stamps = {p: p.stat().st_mtime_ns for p in (tmp_path / "made").rglob("*")}

    jobs.write_text(jobs.read_text().replace("./missing", str(tmp_path / "made" / "missing")))
    code, data = call(jobs)
    assert [j["status"] for j in data["jobs"]] == ["was done", "failed", "was done"]
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "made").rglob("*")} == stamps


def test_a_finished_artifact_of_other_settings_is_no_success(jobs: Path, tmp_path: Path) -> None:
    first, _, third = read_jobs(jobs)
    assert [o.status for o in run_batch([third])] == ["done"]
    other = third.model_copy(update={"bits": 4.0})
    (outcome,) = run_batch([other])
    assert outcome.status == "failed"
    assert "already holds a finished artifact" in str(outcome.error)
    replaced = run_batch([other.model_copy(update={"overwrite": True})])
    assert [o.status for o in replaced] == ["done"]
    assert first.out == str(tmp_path / "made" / "a")


def test_what_a_format_refuses_is_said_before_the_work(jobs: Path, tmp_path: Path) -> None:
    job = read_jobs(jobs)[2].model_copy(update={"export": ("mtp",)})
    (outcome,) = run_batch([job])
    assert outcome.status == "failed"
    assert not Path(job.out).exists()
    (tmp_path / "made" / "c-hf").mkdir(parents=True)
    (tmp_path / "made" / "c-hf" / "mine").touch()
    (outcome,) = run_batch([job.model_copy(update={"export": ("hf",)})])
    assert "exists" in str(outcome.error)
    assert not Path(job.out).exists()


def test_a_fault_of_ours_in_one_job_costs_no_other(jobs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise ValueError("a codebook\nis wrong")

    monkeypatch.setattr("trapetum.quantize.job.quantize_model", fail)
    code, data = call(jobs)
    assert code == 1
    assert [j["status"] for j in data["jobs"]] == ["failed"] * 3
    assert data["jobs"][0]["error"] == "internal error: ValueError: a codebook is wrong"


def test_every_option_of_quantize_is_a_key() -> None:
    """But those that mean one run of one process, and the token, which does not belong into a file."""
    options = set(inspect.signature(quantize_model).parameters)
    alone = {"token", "dry_run", "part", "route", "progress"}
    assert set(BatchJob.model_fields) - {"export"} == options - alone


def test_options_reach_the_job_and_count_for_what_is_done(
    tmp_path: Path, demo_model: Path, demo_text: Path
) -> None:
    (tmp_path / "text.txt").write_text(demo_text.read_text(encoding="utf-8")[:6000], encoding="utf-8")
    path = tmp_path / "jobs.toml"
    lines = [
        *("[[jobs]]", f"model = {json.dumps(str(demo_model))}", "out = 'a'", 'effort = "fast"'),
        *('calibrate = "text.txt"', "calib_tokens = 512"),
        *(
            "[[jobs]]",
            f"model = {json.dumps(str(demo_model))}",
            "out = 'b'",
            'effort = "fast"',
            "target_bpw = 3.6",
        ),
    ]
    path.write_text("\n".join(lines))
    assert [o.status for o in run_batch(read_jobs(path))] == ["done", "done"]
    manifest = json.loads((tmp_path / "a" / "trapetum.json").read_bytes())
    assert manifest["calibration"]["tokens"] == 512
    assert [o.status for o in run_batch(read_jobs(path))] == ["was done", "was done"]
    path.write_text("\n".join(lines).replace("512", "640").replace("3.6", "3.7"))
    outcomes = run_batch(read_jobs(path))
    assert [o.status for o in outcomes] == ["failed", "failed"]
    assert all("already holds a finished artifact" in str(o.error) for o in outcomes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "lists no jobs"),
        ("jobs = 3", r"\[\[jobs\]\] are allowed"),
        ("[[job]]\nmodel = 'm'", "holds job;"),
        ("jobs = [", "is not a TOML file"),
        ("[[jobs]]\nmodel = 'm'", "job 1: out: "),
        (JOB + "bitz = 3", "job 1: bitz: "),
        (JOB + "threads = 0", "job 1: threads: "),
        (JOB + "export = ['tar']", "job 1: export: 'tar' is not one of"),
        (JOB + JOB, "job 2: out is that of another job"),
        ("jobs = [3]", "job 1: is no table"),
    ],
)
def test_a_wrong_list_runs_nothing(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "jobs.toml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=message):
        read_jobs(path)


def test_a_missing_list(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="cannot be read"):
        read_jobs(tmp_path / "none.toml")
