"""Learn the quantiser of short codes: which kind of index a build gets, and what its codes are made with.

It is learned once for a generation of models, from vectors drawn by hash, and an append goes on with it. What
it learns from is bounded (TRAINING_BYTES), whatever the size of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ckn_scale.core.coarse_lists import VECTORS_PER_LIST, learn_lists
from ckn_scale.core.coarse_lists import predict_memory as predict_lists_memory
from ckn_scale.core.sampling import hash_priorities, smallest
from ckn_scale.core.short_codes import learn_quantiser
from ckn_scale.core.vector_codes import VectorCodec, make_codec
from ckn_scale.core.vector_index import KINDS
from ckn_scale.schemas import read_codes
from ckn_scale.search.shortlist import QUANTISER
from ckn_scale.step import ShardResult, Step, WorkerSettings
from ckn_scale.steps.encode_images import EncodeImages
from ckn_scale.storage.index_files import IndexManifest
from ckn_scale.storage.models import save_model
from ckn_scale.storage.run_folder import LEARN_QUANTISER, VECTORS_STAGE, RunFolder
from ckn_scale.storage.stored_files import StoredFile, read_table

COMPARED_BYTES = 128 * 2**20  # of codes that a query may be compared with: some 20 ms of one core
ROWS_WITHOUT_LISTS = 10_000_000  # short codes of so many are scanned as a whole
ROWS_PER_LIST = 2_500
# So many send a query to the right ones; more cost each query and each row more than they save.
MAX_LISTS = 1024
TRAINING_BYTES = 256 * 2**20  # of vectors that pieces are learned from, and of codes that lists are
TRAINING_VECTORS = 4096  # for pieces, at most
FEWEST_SHARDS = 64  # that these vectors are drawn from
_LISTS = 10**6  # a quantiser's number: the generation of the models, then how many lists


def choose_kind(wanted: str, manifest: IndexManifest) -> str | None:
    """`pq` or `ivf-pq`; None when all rows are compared. `wanted` is the setting `index.kind`."""
    if wanted in ("pq", "ivf-pq") and manifest.rows:
        return wanted
    stored = {kind: encoding for encoding, kind in KINDS.items()}[manifest.kind]
    if wanted != "auto" or manifest.rows * make_codec(stored, manifest.dim).code_bytes <= COMPARED_BYTES:
        return None
    return "pq" if manifest.rows <= ROWS_WITHOUT_LISTS else "ivf-pq"


def count_lists(kind: str, rows: int) -> int:
    """A power of four, so that few appends need another quantiser; none where all codes are scanned."""
    if kind == "pq":
        return 0
    lists = 4
    while lists < MAX_LISTS and lists * 4 * ROWS_PER_LIST <= rows:
        lists *= 4
    return lists


@dataclass(frozen=True, eq=False)
class LearnQuantiser(Step):
    """One shard, whose number says for which models and how many lists: it is learned once."""

    generation: int
    lists: int

    name = LEARN_QUANTISER
    version = 2
    sections = (*EncodeImages.sections, "index")

    def shard_ids(self) -> Sequence[int]:
        return [self.generation * _LISTS + self.lists]

    @property
    def file(self) -> StoredFile:
        """What was learned."""
        return self.log.committed()[self.shard_ids()[0]].files[QUANTISER]

    def apply(self, shard_id: int, attempt: str, worker: WorkerSettings) -> ShardResult:
        encoded = self.run.commits(EncodeImages.name).committed()
        files = [commit.files[VECTORS_STAGE] for _, commit in sorted(encoded.items())]
        seed, device = self.settings.sample.seed, self.settings.numerics.device
        wanted = max(TRAINING_VECTORS, VECTORS_PER_LIST * self.lists)
        codec, codes = _draw_codes(self.run, _draw_files(files, wanted, seed), wanted, seed)
        lists, coarse = min(self.lists, len(codes)), None
        if lists:
            coarse = learn_lists(
                lambda rows: codec.decode(codes[rows]), len(codes), lists, seed, device=device
            )
        vectors = codec.decode(codes[: count_vectors(codec.dim)])
        learned = learn_quantiser(vectors, seed, coarse=coarse, device=device)
        file = save_model(self.run.store, QUANTISER, learned.to_part())
        report = {"vectors": len(vectors), "lists": lists, "lists_from": len(codes) if lists else 0}
        return ShardResult(files={QUANTISER: file}, report=report)


def count_vectors(dim: int) -> int:
    """How many vectors pieces are learned from."""
    return min(TRAINING_VECTORS, max(16, TRAINING_BYTES // (4 * dim)))


def predict_learning_memory(dim: int, code_bytes: int, lists: int) -> int:
    """Bytes that the quantiser takes at its peak while it is learned, beside the process itself."""
    wanted = max(TRAINING_VECTORS, VECTORS_PER_LIST * lists)
    codes = min(wanted * code_bytes, max(16 * code_bytes, TRAINING_BYTES))
    return codes + max(predict_lists_memory(dim, lists), 4 * dim * count_vectors(dim))


def _draw_files(files: Sequence[StoredFile], wanted: int, seed: int) -> list[StoredFile]:
    """By hash, until they hold twice what is wanted, and some dozens: not all of a large run is read."""
    drawn: list[StoredFile] = []
    for place in smallest(hash_priorities(seed, np.arange(len(files))), len(files)):
        if len(drawn) >= FEWEST_SHARDS and sum(file.rows for file in drawn) >= 2 * wanted:
            break
        drawn.append(files[place])
    return drawn


def _draw_codes(
    run: RunFolder, files: Sequence[StoredFile], wanted: int, seed: int
) -> tuple[VectorCodec, np.ndarray]:
    """Codes (N, code_bytes) of images in the order of their ids' hashes, and what decodes them.

    At most `wanted`, and TRAINING_BYTES; of the files one at a time is in memory.
    """
    tables = [_usable(read_table(run.store, file, columns=["image_id", "state"])) for file in files]
    metadata = tables[0].schema.metadata
    codec = make_codec(metadata[b"encoding"].decode(), int(metadata[b"dim"]))
    ids = np.concatenate([table.column("image_id").to_numpy() for table in tables])
    most = min(len(ids), wanted, max(16, TRAINING_BYTES // codec.code_bytes))
    drawn = ids[smallest(hash_priorities(seed, ids), most)]
    order = np.argsort(drawn)
    codes = np.empty((most, codec.code_bytes), np.uint8)
    for file in files:
        table = _usable(read_table(run.store, file))
        held = table.column("image_id").to_numpy()
        rows = np.flatnonzero(np.isin(held, drawn))
        codes[order[np.searchsorted(drawn, held[rows], sorter=order)]] = read_codes(table)[rows]
    return codec, codes


def _usable(table: pa.Table) -> pa.Table:
    return table.filter(pc.equal(table.column("state"), "ok"))
