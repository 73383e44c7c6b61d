"""One run, one arithmetic: bytes are equal on one kind of CPU, so another kind does not mix in silently.

numerics/000001.json names the arithmetic of the first worker that computed. A worker of another refuses,
unless a later record allows the mix.
"""

from __future__ import annotations

import socket
from dataclasses import asdict
from typing import Any

from ckn_scale.core.arithmetic import Arithmetic, find_arithmetic
from ckn_scale.errors import RunMismatch
from ckn_scale.storage.run_folder import RunFolder


def require_same_arithmetic(run: RunFolder, device: str) -> Arithmetic:
    """What this process computes with; RunMismatch when the run's results come from another arithmetic."""
    mine = find_arithmetic(device)
    records = [body for _, body in run.numerics.all()]
    if not any("arithmetic" in body for body in records):
        body = {"arithmetic": asdict(mine), "host": socket.gethostname()}
        number = max(run.numerics.numbers(), default=0) + 1
        records.append(run.numerics.create(number, body).body)
    if not any(_fits(body, mine) for body in records):
        first = next(body for body in records if "arithmetic" in body)
        theirs, here = Arithmetic(**first["arithmetic"]), socket.gethostname()
        raise RunMismatch(
            f"{run.url} was computed with {theirs} on host {first['host']}, and host {here} computes with "
            f"{mine}: their bytes differ. Use workers of one kind of CPU and one set of libraries "
            "(ATEN_CPU_CAPABILITY=avx2 makes torch use less than a CPU has), or let them mix, on record, "
            "with `ckn-scale index --allow-mix`"
        )
    return mine


def allow_mix(run: RunFolder) -> None:
    """From now on any arithmetic may work on the run; its bytes are then those of no single kind."""
    if not any(body.get("mix") for _, body in run.numerics.all()):
        run.numerics.append({"mix": True, "host": socket.gethostname()})


def _fits(body: dict[str, Any], mine: Arithmetic) -> bool:
    return bool(body.get("mix")) or body.get("arithmetic") == asdict(mine)
