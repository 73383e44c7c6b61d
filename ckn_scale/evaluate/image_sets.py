"""Image sets with ground truth: which images there are, which are queries, what each should find.

holidays   100000.jpg …: queries end in 00, the rest of their hundred is to be found
ukbench    ukbench00000.jpg …: every image is a query, its group of four is to be found
oxford     gt/<name>_{query,good,ok,junk}.txt beside the images, Paris' too; queries are boxes
groups     groups.tsv (or DATA itself is the file): image and group in two columns; every image
           of a group of two or more is a query, the others of its group are to be found. A third column
           `role` in the header: query (not in the database) or target (no query), as RomePatches has them
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckn_scale.errors import InputError
from ckn_scale.evaluate.regions import ImageFile
from ckn_scale.evaluate.training_images import find_images

UKB_GROUP = 4
OXFORD_PREFIX = "oxc1_"
GROUPS_FILE = "groups.tsv"
ROLES = ("query", "target")


@dataclass(frozen=True)
class Query:
    """`relevant` and `ignored` are positions in the database; ignored ones do not count as ranks."""

    image: ImageFile
    relevant: frozenset[int]
    ignored: frozenset[int] = frozenset()


@dataclass(frozen=True)
class ImageSet:
    """A database and queries with what each should find, judged by `protocol`."""

    protocol: str
    database: tuple[ImageFile, ...]
    queries: tuple[Query, ...]

    @property
    def images(self) -> list[ImageFile]:
        """Database and queries, each image once."""
        return list(dict.fromkeys([*self.database, *(query.image for query in self.queries)]))


def read_image_set(data: Path, protocol: str, *, crop: bool = True) -> ImageSet:
    """`crop`: Oxford's queries are their box, cut out before anything else."""
    readers: dict[str, Callable[[Path], ImageSet]] = {
        "holidays": _read_holidays,
        "ukbench": _read_ukbench,
        "oxford": lambda folder: _read_oxford(folder, crop),
        "groups": _read_groups,
    }
    if protocol not in readers:
        raise InputError(f"no protocol named {protocol!r}; there are: {', '.join(readers)}")
    found = readers[protocol](data)
    if not found.queries:
        raise InputError(f"{data} holds no query of the protocol {protocol}")
    return found


def add_distractors(images: ImageSet, folder: Path) -> ImageSet:
    """The photographs of `folder`, with subfolders, join the database: no query should find them."""
    known = {file.path for file in images.database}
    others = [path for path in find_images(folder) if path not in known]
    if not others:
        raise InputError(f"{folder} holds no photograph that is not of the set itself")
    return replace(images, database=(*images.database, *map(ImageFile, others)))


def _read_holidays(folder: Path) -> ImageSet:
    paths = [path for path in find_images(folder) if re.fullmatch(r"\d{3,}", path.stem)]
    groups = [path.stem[:-2] for path in paths]
    queries = [position for position, path in enumerate(paths) if path.stem.endswith("00")]
    return _from_groups("holidays", paths, groups, queries)


def _read_ukbench(folder: Path) -> ImageSet:
    paths = [path for path in find_images(folder) if re.fullmatch(r"ukbench\d+", path.stem)]
    groups = [str(int(path.stem.removeprefix("ukbench")) // UKB_GROUP) for path in paths]
    members = _members(groups)
    for group, positions in members.items():
        if len(positions) != UKB_GROUP:
            raise InputError(f"group {group} of {folder} has {len(positions)} images, not {UKB_GROUP}")
    database = tuple(map(ImageFile, paths))
    queries = [Query(image, frozenset(members[group])) for image, group in zip(database, groups, strict=True)]
    return ImageSet("ukbench", database, tuple(queries))


def _read_groups(data: Path) -> ImageSet:
    file = data / GROUPS_FILE if data.is_dir() else data
    rows = _read_columns(file)
    paths = [file.parent / row[0] for row in rows]
    missing = [path for path in paths if not path.is_file()]
    if missing:
        raise InputError(f"{file} names {missing[0]}, which does not exist")
    groups, roles = [row[1] for row in rows], [row[2] for row in rows]
    if not any(roles):
        return _from_groups("groups", paths, groups, range(len(rows)))
    wrong = [role for role in roles if role not in ROLES]
    if wrong:
        raise InputError(f"{file} has the role {wrong[0]!r}; there are: {', '.join(ROLES)}")
    return _from_roles(list(zip(map(ImageFile, paths), groups, roles, strict=True)))


def _from_roles(rows: Sequence[tuple[ImageFile, str, str]]) -> ImageSet:
    """Queries and targets apart."""
    targets = [(image, group) for image, group, role in rows if role == "target"]
    members = _members([group for _, group in targets])
    queries = [
        Query(image, frozenset(members[group]))
        for image, group, role in rows
        if role == "query" and group in members
    ]
    return ImageSet("groups", tuple(image for image, _ in targets), tuple(queries))


def _read_columns(file: Path) -> list[tuple[str, str, str]]:
    """Image, group, and the role where the header names that column."""
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError):
        raise InputError(
            f"the protocol groups needs a text file of two columns: {file} cannot be read"
        ) from None
    rows = [tuple(re.split(r"\t" if "\t" in line else r",|;", line.strip())) for line in lines]
    has_roles = bool(rows) and rows[0][:3] == ("image", "group", "role")
    if rows and rows[0][:2] == ("image", "group"):
        rows = rows[1:]
    short = [number for number, row in enumerate(rows, 1) if len(row) < 2]
    if short or not rows:
        where = f"row {short[0]} has one" if short else "it is empty"
        raise InputError(f"{file} must have two columns, image and group: {where}")
    return [(row[0].strip(), row[1].strip(), row[2].strip() if has_roles and row[2:] else "") for row in rows]


def _from_groups(
    protocol: str, paths: Sequence[Path], groups: Sequence[str], queries: Iterable[int]
) -> ImageSet:
    """The query itself is ignored in its ranking."""
    database, members = tuple(map(ImageFile, paths)), _members(groups)
    found = []
    for query in queries:
        others = frozenset(members[groups[query]]) - {query}
        if others:
            found.append(Query(database[query], others, frozenset([query])))
    return ImageSet(protocol, database, tuple(found))


def _members(groups: Sequence[str]) -> dict[str, list[int]]:
    members: dict[str, list[int]] = defaultdict(list)
    for position, group in enumerate(groups):
        members[group].append(position)
    return members


def _read_oxford(folder: Path, crop: bool) -> ImageSet:
    paths = find_images(folder)
    positions = {path.stem: position for position, path in enumerate(paths)}
    files = sorted((folder / "gt").glob("*_query.txt"))
    if not files:
        raise InputError(f"{folder / 'gt'} has no file that ends in _query.txt")
    queries = [_read_oxford_query(file, paths, positions, crop) for file in files]
    return ImageSet("oxford", tuple(map(ImageFile, paths)), tuple(queries))


def _read_oxford_query(file: Path, paths: Sequence[Path], positions: dict[str, int], crop: bool) -> Query:
    try:
        name, *corners = file.read_text().split()
        x1, y1, x2, y2 = map(float, corners)
    except ValueError:
        raise InputError(f"{file} must hold the name of an image and the four numbers of a box") from None

    def look_up(name: str) -> int:
        if name not in positions:
            raise InputError(f"{file} and its lists name {name}, which is not among the images")
        return positions[name]

    def read_list(kind: str) -> set[int]:
        listed = file.with_name(file.name.replace("_query.txt", f"_{kind}.txt"))
        return {look_up(one) for one in listed.read_text().split()} if listed.is_file() else set()

    image = ImageFile(paths[look_up(name.removeprefix(OXFORD_PREFIX))], (x1, y1, x2, y2) if crop else None)
    return Query(image, frozenset(read_list("good") | read_list("ok")), frozenset(read_list("junk")))
