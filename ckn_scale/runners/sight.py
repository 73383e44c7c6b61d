"""Whether workers see what the driver sees: a fresh secret in the run folder, and one image."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from ckn_scale.errors import ImageRejected, InputError
from ckn_scale.steps.plan import PlanReader, require_segments
from ckn_scale.storage.image_sources import read_image
from ckn_scale.storage.run_folder import RunFolder


class Sight(NamedTuple):
    nonce: str
    image_uri: str


@contextmanager
def show_sight(run: RunFolder) -> Iterator[Sight]:
    """Put a secret into the run for workers to read back, as long as there may be new workers."""
    first = PlanReader(run, require_segments(run)).read_shard(0)[0]
    nonce = run.write_nonce()
    try:
        yield Sight(nonce, first.uri)
    finally:
        run.remove_nonce(nonce)


def check_sight(run: RunFolder, sight: Sight) -> None:
    """InputError, naming host and path, unless this process sees the run and its first image."""
    run.check_nonce(sight.nonce)
    try:
        read_image(sight.image_uri)
    except ImageRejected:
        host = socket.gethostname()
        raise InputError(
            f"host {host} does not see the image {sight.image_uri}: all workers must be able to read it"
        ) from None
