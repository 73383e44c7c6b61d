"""`ray job submit` of jobs/pipeline.py to a local cluster: it finishes, and its index answers."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

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
    with ray_head(user_env, num_cpus=3) as address:
        command = [sys.executable, "-c", SUBMIT, address, entrypoint, str(_copy_sources(tmp_path))]
        environment = {**user_env, "RAY_AUTH_MODE": "disabled"}
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stdout + result.stderr
    assert digests_of(run) == reference_digests
    found = parse(command_line("search", run, photos / "rocket-tilt.jpg", "-k", "2", "--json"))
    assert {Path(hit["uri"]).stem for hit in found["results"][0]["hits"]} == {"rocket", "rocket-tilt"}


def _copy_sources(folder: Path) -> Path:
    """What a user's checkout holds, without its environment."""
    target = folder / "checkout"
    for name in ("ckn_scale", "jobs"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    return target
