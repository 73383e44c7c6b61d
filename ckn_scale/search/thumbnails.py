"""Thumbnails of indexed images, from the stage that keeps them: once, however many builds hold the image.

Which file has the thumbnail of an id is known from the plan and the commit of its shard: one that was
encoded or repaired since the index was opened is found, too.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ckn_scale.search.cache import FileCache
from ckn_scale.storage.plans import read_segments
from ckn_scale.storage.run_folder import ENCODE_IMAGES, THUMBNAILS_STAGE, RunFolder
from ckn_scale.storage.run_records import Segment
from ckn_scale.storage.store import Store

FILES_HELD = 4  # some megabytes each


class Thumbnails:
    """Read when they are asked for; nothing is opened before."""

    def __init__(self, store: Store, cache: FileCache) -> None:
        self._store, self._cache = store, cache
        self._run: RunFolder | None = None
        self._segments: list[Segment] = []
        self._read_file = lru_cache(FILES_HELD)(_read_thumbnails)

    def read(self, image_id: int) -> bytes | None:
        """The JPEG of an image; None when it has none. CorruptData when its file is missing or damaged."""
        run = self._run = self._run or RunFolder.open(self._store.url)
        if not self._segments or image_id >= self._segments[-1].next_id:
            self._segments = read_segments(run)
        for segment in self._segments:
            if segment.first_id <= image_id < segment.next_id:
                place = (image_id - segment.first_id) // segment.images_per_shard
                commit = run.commits(ENCODE_IMAGES).get(segment.first_shard + place)
                if commit is None:
                    return None
                table = self._read_file(self._cache.fetch(self._store, commit.files[THUMBNAILS_STAGE]))
                row = pc.index(table.column("image_id"), image_id).as_py()
                jpeg: bytes | None = None if row < 0 else table.column("jpeg")[row].as_py()
                return jpeg
        return None


def _read_thumbnails(path: Path) -> pa.Table:
    return pq.read_table(path)
