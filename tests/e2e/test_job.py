"""`ray job submit` of jobs/pipeline.py to a local cluster: it is seen, it finishes, and its index answers."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from photo_runs import OVERRIDES, digests_of, parse
from ray_head import ray_head

ROOT = Path(__file__).resolve().parents[2]
SUBMIT = """
import sys, time
from ray.job_submission import JobSubmissionClient, JobStatus

client = JobSubmissionClient(sys.argv[1])
for tries in range(60):  # the head answers before its agent can take a job
    try:
        job = client.submit_job(entrypoint=sys.argv[2], runtime_env={"working_dir": sys.argv[3]})
        break
    except RuntimeError as error:
        if "No available agent" not in str(error):
            raise
        time.sleep(1)
while not client.get_job_status(job).is_terminal():
    time.sleep(0.5)
print(client.get_job_logs(job)[-3000:])
sys.exit(0 if client.get_job_status(job) == JobStatus.SUCCEEDED else 1)
"""


@pytest.mark.timeout(600)  # a head may have to be tried more than once
def test_submitted_job_makes_an_index_that_answers(
    photos, reference_digests, user_env, command_line, tmp_path
):
    run = tmp_path / "run"
    overrides = [part for override in OVERRIDES for part in ("--set", override)]
    entrypoint = shlex.join(
        [
            "python",
            "jobs/pipeline.py",
            str(photos),
            str(run),
            "--preset",
            "tiny",
            "--workers",
            "2",
            *overrides,
        ]
    )
    with ray_head(user_env, num_cpus=3) as head:
        command = [sys.executable, "-c", SUBMIT, head.jobs_url, entrypoint, str(_copy_sources(tmp_path))]
        environment = {**user_env, "RAY_AUTH_MODE": "disabled"}
        job = subprocess.Popen(
            command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        with ThreadPoolExecutor(1) as pool:
            scraped = pool.submit(_scrape_until_done, head.metrics_url, job)
            output, _ = job.communicate(timeout=240)
    assert job.returncode == 0, output
    assert any('step="encode_images"' in line for line in scraped.result()), scraped.result()
    assert digests_of(run) == reference_digests
    found = parse(command_line("search", run, photos / "rocket-tilt.jpg", "-k", "2", "--json"))
    assert {Path(hit["uri"]).stem for hit in found["results"][0]["hits"]} == {"rocket", "rocket-tilt"}


def _scrape_until_done(url: str, job: subprocess.Popen[str]) -> set[str]:
    """The lines of our own metrics that a Prometheus would have seen while the job ran."""
    lines: set[str] = set()
    while job.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                lines |= {one for one in answer.read().decode().splitlines() if "ckn_scale_shards" in one}
        except OSError:  # not there yet
            pass
        time.sleep(0.5)
    return lines


def _copy_sources(folder: Path) -> Path:
    """What a user's checkout holds, without its environment."""
    target = folder / "checkout"
    for name in ("ckn_scale", "jobs"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    return target
