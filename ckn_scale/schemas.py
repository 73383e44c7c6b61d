"""The columns of every stage, and the states an image can end in.

Vectors are fixed-size binary with dtype and dim in the schema's metadata: 28 × faster to read
than a list column.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import pyarrow as pa

ImageState = Literal[
    "ok",
    "no_keypoints",  # decoded, but flat: nothing to describe
    "corrupt",
    "truncated",
    "unsupported",
    "too_large",
    "empty",
    "missing",
    "changed",  # other bytes than the plan listed
    "crashed",  # killed its process
    "timeout",  # not decoded and detected within its deadline
    "unreachable",  # its web host does not answer or refuses; may pass
    "deleted",  # by `ckn-scale delete`, or gone from its source
    "replaced",  # its source has other content under its URI by now, which is an image of its own
]
IMAGE_STATES: tuple[str, ...] = get_args(ImageState)
DEAD_STATES = ("deleted", "replaced")  # not failures, and in no version any more

PLANNED_IMAGES = pa.schema(
    [
        ("image_id", pa.int64()),
        ("uri", pa.string()),  # file or object; `#member` names a row or a member inside it
        ("size_bytes", pa.int64()),  # -1 where the source does not say
        ("etag", pa.string()),  # what distinguishes one content from another: etag, or mtime
    ]
)

SAMPLED_PATCHES = pa.schema(
    [
        ("image_id", pa.int64()),
        ("point", pa.int32()),
        ("priority", pa.uint64()),  # hash; the k smallest of any union are the sample
        ("patch", pa.binary()),  # uint8, size × size × 3, RGB; size in the metadata
    ]
)

SAMPLED_PRIORITIES = pa.schema([SAMPLED_PATCHES.field(name) for name in ("image_id", "point", "priority")])

THUMBNAILS = pa.schema([("image_id", pa.int64()), ("jpeg", pa.binary())])


def vectors_schema(encoding: str, dim: int, code_bytes: int) -> pa.Schema:
    """One row per planned image; `vector` is null unless the state is `ok`.

    A vector of `dim` numbers is kept as `code_bytes` bytes of an encoding of `core/vector_codes.py`.
    """
    return pa.schema(
        [
            ("image_id", pa.int64()),
            ("state", pa.string()),
            ("reason", pa.string()),
            ("width_px", pa.int32()),
            ("height_px", pa.int32()),
            ("original_width_px", pa.int32()),  # of the upright original; the others are at working size
            ("original_height_px", pa.int32()),
            ("vector", pa.binary(code_bytes)),
        ],
        metadata={"encoding": encoding, "dim": str(dim)},
    )


# One row per image that has points; each column holds the points one after the other.
DESCRIPTORS = pa.schema(
    [
        ("image_id", pa.int64()),
        ("num_points", pa.int32()),
        ("frames", pa.binary()),  # 9 bytes each
        ("words", pa.binary()),  # uint16 each
        ("codes", pa.binary()),  # 16 bytes each for every channel: the signs of the residual to the word
    ]
)


def sampled_vlads_schema(num_columns: int) -> pa.Schema:
    """A block of columns of the sample's VLADs."""
    return pa.schema(
        [("image_id", pa.int64()), ("vector", pa.binary(2 * num_columns))],
        metadata={"dtype": "float16", "dim": str(num_columns)},
    )


def float_rows_schema(dim: int) -> pa.Schema:
    """Rows (sub-patches, descriptors) drawn by hash for training."""
    return pa.schema(
        [("priority", pa.uint64()), ("row", pa.binary(4 * dim))],
        metadata={"dtype": "float32", "dim": str(dim)},
    )


def planted_queries_schema(dim: int) -> pa.Schema:
    """Queries that certify an index: what follows `original` is null when it was missed.

    `score`, `selective` and `inliers` are of the original; points are null where the run has none.
    """
    return pa.schema(
        [
            ("image_id", pa.int64()),
            ("view", pa.int32()),
            ("original", pa.binary(4 * dim)),
            ("score", pa.float32()),
            ("vector", pa.binary(4 * dim)),
            ("selective", pa.float64()),
            ("inliers", pa.int32()),
            ("num_points", pa.int32()),
            ("words", pa.binary()),  # several uint16 each, nearest first
            ("codes", pa.binary()),
            ("frames", pa.binary()),  # six float32 each
            ("width_px", pa.int32()),
            ("height_px", pa.int32()),
        ],
        metadata={"dtype": "float32", "dim": str(dim)},
    )


def read_float_rows(table: pa.Table) -> np.ndarray:
    """(N, D) float32 of a table of `float_rows`."""
    return _read_binary(table, "row", "<f4")


def read_sampled_vlads(table: pa.Table) -> np.ndarray:
    """(N, D) float16 of a table of `sampled_vlads`."""
    return _read_binary(table, "vector", "<f2")


def read_codes(table: pa.Table) -> np.ndarray:
    """(N, code_bytes) uint8 of a table of `vectors` whose every row has one."""
    column = table.column("vector").combine_chunks()
    width = column.type.byte_width
    flat = np.frombuffer(column.buffers()[1], np.uint8, count=(column.offset + len(column)) * width)
    return flat.reshape(-1, width)[column.offset :]


def _read_binary(table: pa.Table, name: str, dtype: str) -> np.ndarray:
    dim = int(table.schema.metadata[b"dim"])
    column = table.column(name).combine_chunks()
    flat = np.frombuffer(column.buffers()[1], dtype, count=(column.offset + len(column)) * dim)
    return flat.reshape(-1, dim)[column.offset :]
