"""Seconds and peak memory of `ckn-scale status` over a run of 1,000, 10,000 and 100,000 encoded shards.

    python benchmarks/status.py [--shards 1000 10000 100000] [--json FILE]

The run has the records that such a run has (a plan, models, one commit of three files per shard) and no
data: status reads none. The records are written without `fsync`, so making them takes seconds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ckn_scale.config import load_settings
from ckn_scale.storage.records import encode_record, new_attempt
from ckn_scale.storage.run_folder import ENCODE_IMAGES, RunFolder
from ckn_scale.storage.run_records import Generation, PlanSource, Segment
from ckn_scale.storage.shards import Commit
from ckn_scale.storage.stored_files import StoredFile

IMAGES_PER_SHARD = 256


def make_run(folder: Path, num_shards: int) -> RunFolder:
    run = RunFolder.create(str(folder), load_settings("compact").model_dump(mode="json"))
    file = name_file("images", 0)
    segment = Segment(
        number=1,
        first_id=0,
        num_images=num_shards * IMAGES_PER_SHARD,
        first_shard=0,
        images_per_shard=IMAGES_PER_SHARD,
        files=(file,),
        sample=file,
        queries=file,
        source=PlanSource(("photos",), 1, "0" * 64, ""),
        replaced=(),
        columns={},
    )
    run.plan.create(segment)
    run.models.create(Generation(1, {"encoder": name_file("models", 0)}))
    commits = folder / "commits" / ENCODE_IMAGES
    commits.mkdir(parents=True)
    for shard_id in range(num_shards):
        record = encode_record(make_commit(shard_id).to_body())
        (commits / f"{shard_id:05d}.1.json").write_bytes(record)
    return run


def make_commit(shard_id: int) -> Commit:
    return Commit(
        step=ENCODE_IMAGES,
        shard_id=shard_id,
        generation=1,
        attempt=new_attempt(),
        fingerprint="0" * 64,
        files={stage: name_file(stage, shard_id) for stage in ("vectors", "descriptors", "thumbnails")},
        states={"ok": IMAGES_PER_SHARD - 2, "corrupt": 1, "missing": 1},
        worker={"host": f"node-{shard_id % 16}", "pid": 1000 + shard_id % 64, "device": "cpu", "gpus": ""}
        | {"peak_memory_mb": 900 + shard_id % 100},
        seconds=100 + shard_id / 1000,
        started_at=1.7e9 + shard_id,
    )


def name_file(stage: str, shard_id: int) -> StoredFile:
    path = f"{stage}/{shard_id:05d}-{new_attempt()}.parquet"
    return StoredFile(path, hashlib.sha256(path.encode()).hexdigest(), 1_000_000 + shard_id, IMAGES_PER_SHARD)


def measure(folder: Path, num_shards: int) -> dict[str, Any]:
    make_run(folder, num_shards)
    command = [str(Path(sys.executable).parent / "ckn-scale"), "status", str(folder), "--json"]
    begun = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        answer = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - begun
    if process.returncode != 0:
        raise SystemExit(process.returncode)
    assert sum(json.loads(answer)["images"]["states"].values()) == num_shards * IMAGES_PER_SHARD
    cpu_s, peak_mb = used.ru_utime + used.ru_stime, used.ru_maxrss / 1024
    return {"shards": num_shards, "seconds": seconds, "cpu_s": cpu_s, "peak_mb": peak_mb}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shards", type=int, nargs="+", default=[1000, 10_000, 100_000])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory(prefix="ckn-bench-") as folder:
        for num_shards in options.shards:
            results.append(measure(Path(folder) / f"run-{num_shards}", num_shards))
            one = results[-1]
            print(
                f"{one['shards']:>9,} shards  {one['seconds']:7.1f} s  {one['cpu_s']:6.1f} s of CPU  "
                f"{one['peak_mb']:6.0f} MB peak",
                flush=True,
            )
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
