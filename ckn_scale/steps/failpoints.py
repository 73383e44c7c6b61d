"""Places where a test may kill the process: `CKN_SCALE_FAILPOINT=data_written:encode_images:3`.

The test kit uses them to die between the data and its record, and after the record. A step or
shard left empty matches any. Without the variable this is a look at the environment, nothing else.
"""

from __future__ import annotations

import os
import signal

VARIABLE = "CKN_SCALE_FAILPOINT"


def reach(place: str, step: str, shard_id: int) -> None:
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return
    want_place, want_step, want_shard = (*wanted.split(":"), "", "")[:3]
    if place == want_place and want_step in ("", step) and want_shard in ("", str(shard_id)):
        os.kill(os.getpid(), signal.SIGKILL)
