"""A run is a folder; this is the only file that knows the names inside it.

run.json                                          settings and format, created first
numerics/000001.json                              with which arithmetic the run is computed
plan/000001.json                                  segments of the plan
deletions/000001.json, <attempt>.ids              images that were deleted
purges/000001.json                                which of these are gone from all stages; how shards are cut
images/000001-<attempt>/00000-<attempt>.parquet   the images of segment 1
samples/images/00001-<attempt>.parquet            those of them that the models are learned from
queries/images/00001-<attempt>.parquet            those of them that a version may be asked for
background/000001.json, 00001-<attempt>.parquet   photographs that are not indexed, for the reduction
samples/<stage>/00012-<attempt>.parquet           patches, subpatches, descriptors, points, vlads/0000, …
models/<name>-<sha16>.safetensors                 one model, and .json for people
models/000001.json                                generations: all models of the run at once
<stage>/00012-<attempt>.parquet                   vectors, descriptors, thumbnails of encoded images
index/<number>-<attempt>/shard-00000.faiss        index shards, by content; .arrow, .ids, .points beside
index/<build>-<attempt>/manifest.json             what a version is made of; tombstones.ids beside
index/000007.json                                 published versions
queries/<draw>.json, <draw>-outcomes-<attempt>.json, <draw>/00000-<attempt>.parquet   what was asked of one
copies/references/…, copies/pairs/…               what `ckn-scale copies` compared
commits/<step>/00012.1.json                       shard 12 of a step, generation 1
events/…  nonces/…                                for people; for the handshake with workers

Numbers and generations of records are given by `records.py` and `shards.py`, in the folders named here;
`self-test/` is there while `store.py` tries what a store can do.
"""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import pyarrow as pa

from ckn_scale.errors import CorruptData, InputError, RunMismatch
from ckn_scale.storage.events import EventLog
from ckn_scale.storage.filesystems import normalise_url
from ckn_scale.storage.records import RecordLog, create_record, new_attempt, read_record
from ckn_scale.storage.run_records import (
    Background,
    Deletion,
    Generation,
    Numerics,
    Purge,
    Segment,
    Version,
)
from ckn_scale.storage.shards import ShardLog
from ckn_scale.storage.store import Store
from ckn_scale.storage.stored_files import StoredFile, write_table

FORMAT = 3
RUN_RECORD = "run.json"
# Stages: folders of Parquet files. Segments and the background record name those of the first four,
# commits those of the others.
IMAGES_STAGE, SAMPLE_STAGE, QUERY_STAGE = "images", "samples/images", "queries/images"
BACKGROUND_STAGE = "background"
PATCHES_STAGE, PRIORITIES_STAGE = "samples/patches", "samples/priorities"
SUBPATCHES_STAGE, SAMPLE_DESCRIPTORS_STAGE = "samples/subpatches", "samples/descriptors"
SAMPLE_POINTS_STAGE = "samples/points"
VECTORS_STAGE, DESCRIPTORS_STAGE, THUMBNAILS_STAGE = "vectors", "descriptors", "thumbnails"
REFERENCES_STAGE, COPIES_STAGE = "copies/references", "copies/pairs"
# Steps whose records are looked up where their classes are not imported: torch takes seconds.
SAMPLE_VLADS, ENCODE_IMAGES, BUILD_INDEX = "sample_vlads", "encode_images", "build_index"
PLANT_QUERIES, CERTIFY_INDEX = "plant_queries", "certify_index"
LEARN_QUANTISER, MAKE_CODES, MEASURE_SHORTLIST = "learn_quantiser", "make_codes", "measure_shortlist"
AUGMENT_INDEX = "augment_index"
DRAW_REFERENCES, FIND_COPIES = "draw_references", "find_copies"

_SHARD_FILE = re.compile(r"(?P<stage>.+)/(?P<number>\d{5,})-[0-9a-f]+\.parquet")
_SEGMENT_FILE = re.compile(IMAGES_STAGE + r"/(?P<number>\d{6,})-[0-9a-f]+/.+")
_INDEX_FILE = re.compile(r"index/(?P<number>\d{5,})-[0-9a-f]+/shard-\d{5,}\..+")
_RUN_RECORD_BYTES = 1 << 20  # ours have some thousand
_MISSING = "(not set)"
_DIFFERENCES_SHOWN = 5


class RunFolder:
    """An open run. Cheap to open again by its url, and picklable."""

    def __init__(self, store: Store, body: dict[str, Any]) -> None:
        self.store = store
        self.url = store.url
        self.body = body
        self.settings: dict[str, Any] = body["settings"]
        self.plan = RecordLog(store, "plan", Segment)
        self.deletions = RecordLog(store, "deletions", Deletion)
        self.purges = RecordLog(store, "purges", Purge)
        self.background = RecordLog(store, "background", Background)
        self.models = RecordLog(store, "models", Generation)
        self.numerics = RecordLog(store, "numerics", Numerics)
        self.versions = RecordLog(store, "index", Version)
        self._commits: dict[str, ShardLog] = {}

    @classmethod
    def create(cls, url: str, settings: dict[str, Any]) -> RunFolder:
        """A new run, or the one that is there if its settings are equal; else RunMismatch."""
        store = Store(url)
        store.self_test()
        wanted = _as_json(settings)
        body = {"format": FORMAT, "settings": wanted, "created_at": time.time()}
        recorded = create_record(store, RUN_RECORD, body).record
        run = cls._checked(store, recorded)
        _check_settings(store.url, run.settings, wanted)
        return run

    @classmethod
    def open(cls, url: str) -> RunFolder:
        """The run at `url`; InputError when there is none."""
        store = Store(url)
        try:
            return cls._checked(store, read_record(store, RUN_RECORD))
        except FileNotFoundError as error:
            raise InputError(f"{store.url} is not a run folder: it has no {RUN_RECORD}") from error

    def commits(self, step: str) -> ShardLog:
        """The commit records of a step: one log for all who ask, so that a process reads each once."""
        return self._commits.setdefault(step, ShardLog(self.store, f"commits/{step}", step))

    def logs(self) -> Sequence[str]:
        """The steps that have commit records."""
        return self.store.list_folders("commits")

    def list_samples(self) -> list[str]:
        """The files that the models were learned from."""
        return [path for path in self.store.list("samples") if is_of_sample(path)]

    def data_path(self, stage: str, shard_id: int, attempt: str) -> str:
        return f"{stage}/{shard_id:05d}-{attempt}.parquet"

    def write_table(self, stage: str, shard_id: int, attempt: str, table: pa.Table) -> StoredFile:
        """One shard of a stage as Parquet; equal tables give equal bytes."""
        return write_table(self.store, self.data_path(stage, shard_id, attempt), table)

    def index_folder(self, name: str | int, attempt: str) -> str:
        """Of an index shard, by its number, or of the manifest of a build."""
        return f"index/{name}-{attempt}"

    def deleted_path(self, attempt: str) -> str:
        """The ids of one record of deletions."""
        return f"deletions/{attempt}.ids"

    def draw_path(self, draw: str) -> str:
        """Which images a version is asked for."""
        return f"queries/{draw}.json"

    def outcomes_path(self, draw: str, attempt: str) -> str:
        """What became of the queries of a draw."""
        return f"queries/{draw}-outcomes-{attempt}.json"

    @cached_property
    def events(self) -> EventLog:
        return EventLog(self.store, "events")

    def write_nonce(self) -> str:
        """A file that every worker must see before it works; returns what to hand to `check_nonce`."""
        nonce = new_attempt()
        self.store.write_new(_nonce_path(nonce), nonce.encode())
        return nonce

    def check_nonce(self, nonce: str) -> None:
        """InputError when this host does not see the run that the driver wrote."""
        try:
            seen = self.store.read(_nonce_path(nonce)) == nonce.encode()
        except FileNotFoundError:
            seen = False
        if not seen:
            host = socket.gethostname()
            raise InputError(
                f"host {host} does not see the run at {self.url}: use a folder that all hosts share, or s3://"
            )

    def remove_nonce(self, nonce: str) -> None:
        self.store.delete(_nonce_path(nonce))

    def __reduce__(self) -> tuple[Any, ...]:
        return (RunFolder, (self.store, self.body))

    @classmethod
    def _checked(cls, store: Store, body: dict[str, Any]) -> RunFolder:
        if body.get("format") != FORMAT:
            raise RunMismatch(
                f"{store.url} has run format {body.get('format')}, this version of ckn_scale reads {FORMAT}: "
                "index its images into another folder"
            )
        if not isinstance(body.get("settings"), dict):
            raise CorruptData(f"{store.address(RUN_RECORD)} has no settings")
        return cls(store, body)


def is_run(url: str) -> bool:
    """Whether a run was begun at `url`; looks, writes nothing."""
    return Store(url).exists(RUN_RECORD)


def holds_run(url: str) -> bool:
    """Whether the folder is a run, of whatever format: a file of that name by others is no run."""
    if normalise_url(url).startswith("file://"):  # not UTF-8: no run is made there
        return False
    store = Store(url)
    try:
        if store.size(RUN_RECORD) > _RUN_RECORD_BYTES:
            return False
        body = json.loads(store.read(RUN_RECORD))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    return isinstance(body, dict) and {"format", "settings", "checksum"} <= body.keys()


def segment_stage(number: int, attempt: str) -> str:
    """The files of one segment of the plan."""
    return f"{IMAGES_STAGE}/{number:06d}-{attempt}"


def sampled_vlads_stage(block: int) -> str:
    """One block of columns of the VLADs that the reduction is learned on."""
    return f"samples/vlads/{block:04d}"


def planted_stage(draw: str) -> str:
    """The planted queries of one draw."""
    return f"queries/{draw}"


def model_path(name: str, sha256: str) -> str:
    return f"models/{name}-{sha256[:16]}.safetensors"


def description_path(model: str) -> str:
    """The copy of a model's description for people, beside the model."""
    return model.removesuffix("safetensors") + "json"


def split_generation_url(url: str) -> tuple[str, int | None]:
    """A run and one of its generations, from the url of the record `models/000001.json`; None: the latest.

    InputError when it is a .json file, but not one of these.
    """
    if not url.endswith(".json"):
        return url, None
    run_url, _, record = url.rpartition("/models/")
    number = record.removesuffix(".json")
    if not number.isdigit():
        raise InputError(f"{url} is no record of models: give a run, or its models/000001.json")
    return run_url, int(number)


def index_shard_path(folder: str, position: int, suffix: str) -> str:
    return f"{folder}/shard-{position:05d}.{suffix}"


def manifest_path(folder: str) -> str:
    return f"{folder}/manifest.json"


def tombstones_path(folder: str) -> str:
    return f"{folder}/tombstones.ids"


def is_of_sample(path: str) -> bool:
    """Whether models are learned from this file; the list of the sampled images is needed afterwards, too."""
    return path.startswith("samples/") and not path.startswith(f"{SAMPLE_STAGE}/")


def parse_data_path(path: str) -> tuple[str, int] | None:
    """What a data file belongs to: (stage, shard), (`images`, segment) or (`build_index`, index shard).

    None when it is no data file.
    """
    if match := _SEGMENT_FILE.fullmatch(path):
        return IMAGES_STAGE, int(match["number"])
    if match := _SHARD_FILE.fullmatch(path):
        return match["stage"], int(match["number"])
    if match := _INDEX_FILE.fullmatch(path):
        return BUILD_INDEX, int(match["number"])
    return None


def _nonce_path(nonce: str) -> str:
    return f"nonces/{nonce}"


def _as_json(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings as a record gives them back: tuples become lists."""
    parsed: dict[str, Any] = json.loads(json.dumps(settings, allow_nan=False))
    return parsed


def _check_settings(url: str, old: dict[str, Any], new: dict[str, Any]) -> None:
    old_flat, new_flat = _flatten(old), _flatten(new)
    keys = [key for key in sorted({*old_flat, *new_flat}) if old_flat.get(key) != new_flat.get(key)]
    if not keys:
        return
    parts = [
        f"{key} is {old_flat.get(key, _MISSING)!r} there and {new_flat.get(key, _MISSING)!r} here"
        for key in keys[:_DIFFERENCES_SHOWN]
    ]
    more = f" (and {len(keys) - _DIFFERENCES_SHOWN} more)" if len(keys) > _DIFFERENCES_SHOWN else ""
    raise RunMismatch(
        f"{url} was made with other settings: {'; '.join(parts)}{more}: leave --preset, --config, "
        "--set and --device out to go on with its own, or use another run folder"
    )


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": [1]}} → {"a.b.0": 1}; empty containers are values."""
    if isinstance(value, dict) and value:
        pairs = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list) and value:
        pairs = [(str(i), item) for i, item in enumerate(value)]
    else:
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, item in pairs:
        flat |= _flatten(item, f"{prefix}.{key}" if prefix else key)
    return flat
