"""The points of one index shard as one flat file: what matching and geometry read of a candidate.

    header     64 bytes: magic, rows, points, bytes of a code, bytes of a frame
    ids        (rows,) int64, ascending
    offsets    (rows + 1,) int64: the points of row r are offsets[r] … offsets[r + 1]
    sizes      (rows, 4) int32: width and height at working size, then those of the original (0: not known)
    records    row by row: words (n,) uint16 | codes (n, B) | frames (n, F)

All numbers are little-endian. The points of an image are sorted by word, the strongest of a word first, so
that what shares a word lies together. A candidate's words and codes are one range of the file, its frames
the next one, which is read for those that come into question only. Ranges are announced to the kernel all at
once and then read one by one: a cold disk fetches them side by side, a warm one costs a copy.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ckn_scale.errors import CorruptData

MAGIC = b"cknpts01"
HEADER_BYTES = 64
WORD_BYTES = 2
SIZES = ("width_px", "height_px", "original_width_px", "original_height_px")
_HEADER = struct.Struct("<8s4q")


@dataclass(frozen=True)
class StoredPoints:
    """Words and codes of the points of some rows, one row after the other."""

    words: np.ndarray  # (P,) uint16
    codes: np.ndarray  # (P, B) uint8
    offsets: np.ndarray  # (rows + 1,) int64


def serialise_points(images: pa.Table, descriptors: pa.Table) -> bytes:
    """The file for the rows of `images` (image_id and sizes, ids ascending), their points in `descriptors`.

    An image without a row in `descriptors` has no points. ValueError when ids do not ascend or a record has
    not the bytes that its number of points asks for.
    """
    ids = images.column("image_id").to_numpy().astype("<i8")
    if (np.diff(ids) <= 0).any():
        raise ValueError("the points' image_id must ascend strictly")
    rows = descriptors.take(pc.index_in(pa.array(ids), descriptors.column("image_id").combine_chunks()))
    counts = np.array(pc.fill_null(rows.column("num_points"), 0), np.int64)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype("<i8")
    records = [
        _sort_record(words or b"", codes or b"", frames or b"", count)
        for words, codes, frames, count in zip(
            *(rows.column(name).to_pylist() for name in ("words", "codes", "frames")),
            counts.tolist(),
            strict=True,
        )
    ]
    code_bytes, frame_bytes = _find_widths(rows, counts)
    header = _HEADER.pack(MAGIC, len(ids), int(offsets[-1]), code_bytes, frame_bytes)
    parts = [header.ljust(HEADER_BYTES, b"\0"), ids.tobytes(), offsets.tobytes(), _pack_sizes(images)]
    return b"".join([*parts, *records])


def _sort_record(words: bytes, codes: bytes, frames: bytes, count: int) -> bytes:
    """One image's points sorted by word; those of a word stay in their order, which is that of strength."""
    if len(words) != WORD_BYTES * count or (count and (len(codes) % count or len(frames) % count)):
        sizes = f"{len(words)}, {len(codes)} and {len(frames)} bytes of words, codes and frames"
        raise ValueError(f"{count} points do not have {sizes}")
    if count == 0:
        return b""
    array = np.frombuffer(words, "<u2")
    order = np.argsort(array, kind="stable")
    columns = (np.frombuffer(one, np.uint8).reshape(count, -1)[order].tobytes() for one in (codes, frames))
    return b"".join([array[order].tobytes(), *columns])


def _find_widths(rows: pa.Table, counts: np.ndarray) -> tuple[int, int]:
    """Bytes of a code and of a frame, the same for all points; 0 where there are none."""
    widths = []
    for name in ("codes", "frames"):
        lengths = np.array(pc.fill_null(pc.binary_length(rows.column(name)), 0), np.int64)
        found = np.unique(lengths[counts > 0] // counts[counts > 0])
        if len(found) > 1:
            raise ValueError(f"the {name} of all points must be equally long, got {found.tolist()} bytes")
        widths.append(int(found[0]) if len(found) else 0)
    return widths[0], widths[1]


def _pack_sizes(images: pa.Table) -> bytes:
    sizes = np.zeros((len(images), len(SIZES)), "<i4")
    for column, name in enumerate(SIZES):
        if name in images.column_names:
            sizes[:, column] = images.column(name).to_numpy()
    return sizes.tobytes()


def read_point_ids(data: bytes) -> np.ndarray:
    """The ids of the rows of a file of points; CorruptData when it has another form."""
    header = _parse_header(data[:HEADER_BYTES], len(data), "it")
    return np.frombuffer(data, "<i8", header.rows, HEADER_BYTES)


@dataclass(frozen=True)
class _Header:
    rows: int
    points: int
    code_bytes: int
    frame_bytes: int

    @property
    def point_bytes(self) -> int:
        return WORD_BYTES + self.code_bytes + self.frame_bytes

    @property
    def first_record(self) -> int:
        """Where the records begin, after header, ids, offsets and sizes."""
        return HEADER_BYTES + 8 * self.rows + 8 * (self.rows + 1) + 16 * self.rows


def _parse_header(data: bytes, size_bytes: int, name: str) -> _Header:
    if len(data) < HEADER_BYTES or not data.startswith(MAGIC):
        raise CorruptData(f"{name} is no file of points")
    header = _Header(*_HEADER.unpack_from(data)[1:])
    if size_bytes != header.first_record + header.points * header.point_bytes:
        raise CorruptData(f"{name} has {size_bytes} bytes, not what its {header.points} points take")
    return header


class PointFile:
    """An open file of points; threads may share it. The rows that are asked for are read, nothing else."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        header = _parse_header(os.pread(self._fd, HEADER_BYTES, 0), os.fstat(self._fd).st_size, str(path))
        self._header, rows = header, header.rows
        tables = np.memmap(path, np.uint8, "r", HEADER_BYTES, (header.first_record - HEADER_BYTES,))
        self.ids: np.ndarray = tables[: 8 * rows].view("<i8")
        self._offsets: np.ndarray = tables[8 * rows : 8 * (2 * rows + 1)].view("<i8")
        self._sizes: np.ndarray = tables[8 * (2 * rows + 1) :].view("<i4").reshape(rows, len(SIZES))

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)

    def read_points(self, rows: Sequence[int] | np.ndarray) -> StoredPoints:
        """Words and codes of the points of these rows, in their order."""
        starts, counts = self._locate(rows)
        offsets = np.concatenate([[0], np.cumsum(counts)])
        words = np.empty(offsets[-1], "<u2")
        codes = np.empty((offsets[-1], self._header.code_bytes), np.uint8)
        self._announce(starts, counts * (WORD_BYTES + self._header.code_bytes))
        self._read(starts, offsets, words, codes)
        return StoredPoints(words.astype(np.uint16, copy=False), codes, offsets)

    def read_frames(self, rows: Sequence[int] | np.ndarray) -> np.ndarray:
        """(P, F) uint8: the packed frames of the points of these rows, as `read_points` orders them."""
        starts, counts = self._locate(rows)
        offsets = np.concatenate([[0], np.cumsum(counts)])
        frames = np.empty((offsets[-1], self._header.frame_bytes), np.uint8)
        starts = starts + counts * (WORD_BYTES + self._header.code_bytes)
        self._announce(starts, counts * self._header.frame_bytes)
        self._read(starts, offsets, frames)
        return frames

    def sizes_px(self, rows: Sequence[int] | np.ndarray) -> np.ndarray:
        """(R, 4) int32: width and height at working size, then of the original, 0 where it is not known."""
        return np.array(self._sizes[np.asarray(rows, np.int64)])

    def _locate(self, rows: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where the records of rows begin in the file, and how many points each has."""
        chosen = np.asarray(rows, np.int64)
        first = self._offsets[chosen]
        return self._header.first_record + first * self._header.point_bytes, self._offsets[chosen + 1] - first

    def _announce(self, starts: np.ndarray, sizes: np.ndarray) -> None:
        for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
            if size:
                os.posix_fadvise(self._fd, start, size, os.POSIX_FADV_WILLNEED)

    def _read(self, starts: np.ndarray, offsets: np.ndarray, *columns: np.ndarray) -> None:
        """Each record into its rows of the columns, which follow each other in the file."""
        views = [one.reshape(-1).view(np.uint8).data for one in columns]
        widths = [one[:1].nbytes if len(one) else 0 for one in columns]
        places = zip(starts.tolist(), offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
        for start, first, end in places:
            if first == end:
                continue
            parts = [view[first * width : end * width] for view, width in zip(views, widths, strict=True)]
            if os.preadv(self._fd, parts, start) != (end - first) * sum(widths):
                raise CorruptData(f"{self._path} ends before the points of a row do")
