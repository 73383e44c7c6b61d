"""Places where a test may kill or hang this process. Without the variables: a look at the environment.

CKN_SCALE_FAILPOINT=data_written:encode_images:3   die between the data and the record of a shard
CKN_SCALE_FAILPOINT=recorded:encode_images         die after a record (any shard)
CKN_SCALE_FAILPOINT=data_written:encode_images:3:STOP   stop there, until SIGCONT
CKN_SCALE_FAILPOINT=data_written:publish:1:STOP    before the record of version 1; plan:2: of segment 2;
                                                   rollback:3: of version 3, which restores an earlier one
CKN_SCALE_FAILPOINT=data_written:delete:1          before a record of deletions, recorded:delete:1 after it;
                                                   purge:1 likewise; published:purge:4: version 4 is
                                                   current, and the files of before are still there
CKN_SCALE_IMAGE_KILLS=name.jpg                     an image that kills the process preparing it
CKN_SCALE_IMAGE_HANGS=name.jpg                     an image whose preparation never ends
"""

from __future__ import annotations

import os
import signal
import time

SHARD_VARIABLE = "CKN_SCALE_FAILPOINT"
KILL_VARIABLE = "CKN_SCALE_IMAGE_KILLS"
HANG_VARIABLE = "CKN_SCALE_IMAGE_HANGS"


def hit_failpoint(place: str, step: str, shard_id: int) -> None:
    """Die or stop here, if a test wants it at this place of this step and shard."""
    wanted = os.environ.get(SHARD_VARIABLE)
    if not wanted:
        return
    want_place, want_step, want_shard, name = (*wanted.split(":"), "", "", "")[:4]
    if place == want_place and want_step in ("", step) and want_shard in ("", str(shard_id)):
        os.kill(os.getpid(), signal.SIGSTOP if name == "STOP" else signal.SIGKILL)


def hit_image_failpoint(uri: str) -> None:
    """Die or hang here, if a test wants it for this image."""
    if _is_named(KILL_VARIABLE, uri):
        os.kill(os.getpid(), signal.SIGKILL)
    if _is_named(HANG_VARIABLE, uri):
        while True:  # also when the test is over: Python's end aborts in a thread that decodes
            time.sleep(1)


def _is_named(variable: str, uri: str) -> bool:
    name = os.environ.get(variable)
    return bool(name) and uri.endswith(str(name))
