"""Which images of a published version show the same, for tools that reconstruct scenes from them.

    hloc        pairs.txt: two names a line, as hloc reads pairs
    colmap-db   database.db: keypoints, matches and verified matches, as COLMAP and pycolmap open it

An image is asked for by its stored vector and points; of those that match, the best few make pairs. Names are
relative to a folder, as these tools want them: one that is given, or the one that all images lie below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ckn_scale.errors import InputError
from ckn_scale.runs.colmap import ColmapDatabase, Pixels
from ckn_scale.search.evidence import points_of, stored_query
from ckn_scale.search.matches import MatchedPair, find_matched_pairs
from ckn_scale.search.shard import ShardGroup
from ckn_scale.search.versions import open_version
from ckn_scale.storage.output_folders import new_folder
from ckn_scale.storage.run_folder import RunFolder

OnRows = Callable[[int, int], None]  # done, total
FORMS = ("hloc", "colmap-db")
DEPTH = 100  # nearest by vectors that are looked at, or ten times the pairs that are wanted


@dataclass(frozen=True)
class PairExport:
    """What was written."""

    version: int
    images: int
    pairs: int
    matches: int  # verified ones, of all pairs
    image_root: str  # that names are relative to
    files: dict[str, int]  # bytes by name, in the folder


def export_pairs(
    run: RunFolder,
    target: str,
    form: str,
    version: int | None = None,
    *,
    neighbours: int = 20,
    image_root: str | None = None,
    on_rows: OnRows = lambda done, total: None,
) -> PairExport:
    """Write the pairs of the current (or a given) version to the new local folder `target`, in one of FORMS.

    InputError when the version keeps no points, or an image does not lie below `image_root`.
    """
    with new_folder(target, run) as folder:
        published = open_version(run, version)
        group = ShardGroup(run.store, published.manifest)
        if not group.has_points and group.rows:
            raise InputError(
                f"{run.url} version {published.number} keeps no points: it has no pairs to export"
            )
        root, names = _name_images(group, image_root)
        depth = max(DEPTH, 10 * neighbours)
        ids = sorted(names)
        found = find_matched_pairs(group, ids, published.calibration, k=neighbours, depth=depth)
        counted = _Counted(found, len(ids), on_rows)
        if form == "hloc":
            _write_hloc(folder / "pairs.txt", names, counted)
        else:
            _write_colmap(folder / "database.db", group, names, counted)
        files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    return PairExport(published.number, len(names), counted.pairs, counted.matches, root, files)


class _Counted:
    """The pairs, one after the other, while they are counted and progress is shown."""

    def __init__(self, found: Iterator[tuple[int, list[MatchedPair]]], total: int, on_rows: OnRows) -> None:
        self._found, self._total, self._on_rows = found, total, on_rows
        self.pairs = self.matches = 0

    def __iter__(self) -> Iterator[MatchedPair]:
        for done, (_, pairs) in enumerate(self._found, start=1):
            self.pairs += len(pairs)
            self.matches += sum(len(pair.matches.verified.inliers) for pair in pairs)
            yield from pairs
            self._on_rows(done, self._total)


def _name_images(group: ShardGroup, image_root: str | None) -> tuple[str, dict[int, str]]:
    """The folder that names are relative to, and the name of each image that is not deleted."""
    uris = {
        image_id: uri
        for shard in group.shards
        for image_id, uri in zip(shard.index.ids.tolist(), shard.table.column("uri").to_pylist(), strict=True)
        if shard.position(image_id) is not None
    }
    root = find_common_folder(list(uris.values())) if image_root is None else f"{image_root.rstrip('/')}/"
    for uri in uris.values():
        if not uri.startswith(root):
            raise InputError(f"--image-root {image_root}: the image {uri} does not lie below it")
    return root, {image_id: uri.removeprefix(root) for image_id, uri in uris.items()}


def find_common_folder(uris: Sequence[str]) -> str:
    """The longest folder, with its slash, that all lie below; empty where there is none."""
    folders = [uri.split("/")[:-1] for uri in (min(uris), max(uris))] if uris else [[], []]
    shared = 0
    while shared < min(map(len, folders)) and folders[0][shared] == folders[1][shared]:
        shared += 1
    return "".join(f"{part}/" for part in folders[0][:shared])


def _write_hloc(path: Path, names: dict[int, str], pairs: _Counted) -> None:
    for name in names.values():
        if any(letter.isspace() for letter in name):
            raise InputError(f"{name!r} holds a blank, which ends a name in hloc's pairs: rename the file")
    with path.open("w", encoding="utf-8") as file:
        for pair in pairs:
            file.write(f"{names[pair.first]} {names[pair.second]}\n")


def _write_colmap(path: Path, group: ShardGroup, names: dict[int, str], pairs: _Counted) -> None:
    """An image's number in the database is its id + 1."""
    pixels: dict[int, Pixels] = {}
    with ColmapDatabase(path) as database:
        for shard in group.shards:
            for row, image_id in enumerate(shard.index.ids.tolist()):
                if image_id in names:
                    width, height, *original = points_of(shard).sizes_px([row])[0].tolist()
                    pixels[image_id] = Pixels((width, height), (original[0], original[1]))
                    frames = stored_query(shard, row).frames
                    database.add_image(image_id + 1, names[image_id], pixels[image_id], frames)
        for pair in pairs:
            _add_pair(database, pair, pixels[pair.first], pixels[pair.second])


def _add_pair(database: ColmapDatabase, pair: MatchedPair, first: Pixels, second: Pixels) -> None:
    matches = np.stack([pair.matches.query, pair.matches.points], axis=1)
    verified = pair.matches.verified
    transform = np.eye(3) if verified.transform is None else verified.transform
    homography = second.matrix @ transform @ np.linalg.inv(first.matrix)
    homography = homography / homography[2, 2]
    database.add_pair(pair.first + 1, pair.second + 1, matches, matches[verified.inliers], homography)
