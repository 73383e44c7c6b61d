"""Where images come from: which there are in a folder, list, archive or table, and the bytes of one.

folder/            every image below it, and the members of tar and Parquet files below it
folder/*/a*.jpg    what a glob matches, each by its kind
list.txt           one URI per line; .csv and .parquet lists have a column for it
shard.tar          WebDataset: `shard.tar#member`
shard.parquet      image bytes in a column: `shard.parquet#00000012`, the row
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice

from ckn_scale.errors import ImageRejected, InputError, TransientStoreError
from ckn_scale.storage import image_lists, image_tables, tars
from ckn_scale.storage.filesystems import normalise_url, split_protocol
from ckn_scale.storage.http_images import HttpImages, is_http
from ckn_scale.storage.image_refs import IMAGE_EXTENSIONS, BrokenContainer, ImageRef, extension
from ckn_scale.storage.input_files import InputFile, expand_glob, find_files, is_glob, stat_input
from ckn_scale.storage.local_files import NotRegularFile
from ckn_scale.storage.retries import RetryPolicy, call_with_retries

__all__ = ["IMAGE_EXTENSIONS", "ImageRef", "image_exists", "list_images", "read_image", "split_container"]

# The first `.tar#` ends the container's name: what a member is called never leads to another file.
_CONTAINER = re.compile(r"(?P<file>.+?\.(?P<kind>tar|parquet|pq))#(?P<member>.+)", re.IGNORECASE | re.DOTALL)
_COMPRESSED_TARS = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
_READ_RETRY = RetryPolicy(attempts=6)
_TARS_AHEAD = 8
_NAMES_CHECKED = 100  # of a list, until one is found
Lister = Callable[[InputFile, Sequence[str]], Iterator[ImageRef]]


def list_images(
    source: str | Sequence[str], *, keep: Sequence[str] = (), may_be_empty: bool = False
) -> Iterator[ImageRef]:
    """Every image of the source or sources, in no order; `keep` names columns that travel along.

    InputError when a source is missing, cannot be read, or has no image in it and may not be empty.
    """
    sources = [source] if isinstance(source, str) else list(source)
    if not sources:
        raise InputError("no images were named")
    for one in sources:
        yield from _list_by_form(one, keep) if may_be_empty else _list_one(one, keep)


def read_image(uri: str, *, etag: str = "", http: HttpImages | None = None) -> bytes:
    """The bytes of one image. With the etag that was listed, a tar member is read by its range at once.

    ImageRejected("missing") on a definite not-found, TransientStoreError when the store keeps failing.
    Web hosts are no stores: one that keeps failing is ImageRejected("unreachable"). `http` remembers
    connections and dead hosts from one image to the next.
    """
    if is_http(uri) and http is None:
        with HttpImages() as own:
            return read_image(uri, etag=etag, http=own)
    try:
        if http is not None and is_http(uri):
            return _read_http(uri, etag, http)
        return call_with_retries(lambda: _read_once(uri, etag), _READ_RETRY, uri)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise ImageRejected("missing", f"{uri} does not exist") from error
    except NotRegularFile as error:
        raise ImageRejected("unsupported", str(error)) from error
    except BrokenContainer as error:
        raise ImageRejected("corrupt", str(error)) from error


def _read_http(uri: str, etag: str, http: HttpImages) -> bytes:
    """A whole image, or a member of an archive or table by its ranges."""
    if _CONTAINER.fullmatch(uri) is None:
        return http.read(uri)
    http.check_host(uri)
    try:
        return call_with_retries(lambda: _read_once(uri, etag), _READ_RETRY, uri)
    except TransientStoreError as error:
        http.give_up_on(uri, str(error))
        raise ImageRejected("unreachable", str(error)) from error
    except Exception as error:
        if not isinstance(status := getattr(error, "status", None), int):
            raise
        state = "missing" if status in (404, 410) else "unreachable"
        raise ImageRejected(state, f"{uri} was answered with HTTP {status}") from error


def split_container(uri: str) -> str:
    """The file that an image lies in: itself, or the archive or table that it is a member of."""
    match = _CONTAINER.fullmatch(uri)
    return match["file"] if match else uri


def image_exists(uri: str) -> bool:
    """Whether the image's file is there, or the archive or table it lies in; nothing is opened."""
    return stat_input(split_container(uri)) is not None


def _read_once(uri: str, etag: str) -> bytes:
    match = _CONTAINER.fullmatch(uri)
    if match is None:
        return InputFile(normalise_url(uri)).read()
    file = InputFile(normalise_url(match["file"]))
    if match["kind"].lower() == "tar":
        return tars.read_member(file, match["member"], etag)
    return image_tables.read_row(file, match["member"])


def _list_one(source: str, keep: Sequence[str]) -> Iterator[ImageRef]:
    found = False
    for ref in _list_by_form(source, keep):
        found = True
        yield ref
    if not found:
        raise InputError(f"there is no image in {source}")


def _list_by_form(source: str, keep: Sequence[str]) -> Iterator[ImageRef]:
    entry = None if is_glob(source) else stat_input(source)
    if entry is not None and entry.is_special:
        raise InputError(f"{source} is neither a file nor a folder: a FIFO, socket or device has no images")
    if entry is not None and not entry.is_folder:
        yield from _list_named_file(entry, keep)
        return
    if entry is None and not is_glob(source):
        raise InputError(f"{source} does not exist")
    files = find_files(normalise_url(source)) if entry is not None else expand_glob(source)
    yield from _list_found_files(files, keep)


def _list_named_file(file: InputFile, keep: Sequence[str]) -> Iterator[ImageRef]:
    """A file the user named: a list, an archive, a table, or else one image whatever its name."""
    if file.url.lower().endswith(_COMPRESSED_TARS):
        raise InputError(f"{file.url} is a compressed tar, whose members have no ranges: unpack it to .tar")
    kinds: dict[str, Lister] = {
        "txt": _list_text,
        "csv": _list_rows,
        "tsv": _list_rows,
        "tar": tars.list_members,
        "parquet": _list_parquet,
        "pq": _list_parquet,
    }
    return kinds.get(extension(file.url), _list_single)(file, keep)


def _list_found_files(files: Iterable[InputFile], keep: Sequence[str]) -> Iterator[ImageRef]:
    """Files met in a folder or glob: images, tar members, rows with bytes; the rest is passed over.

    Tars are scanned by threads, a bounded number ahead, because a scan waits for the store.
    """
    scans: deque[Future[list[ImageRef]]] = deque()
    with ThreadPoolExecutor(_TARS_AHEAD) as pool:
        for file in files:
            if extension(file.url) == "tar":
                scans.append(pool.submit(_scan_tar, file, keep))
                if len(scans) >= _TARS_AHEAD:
                    yield from scans.popleft().result()
            else:
                yield from _list_found_file(file, keep)
        while scans:
            yield from scans.popleft().result()


def _scan_tar(file: InputFile, keep: Sequence[str]) -> list[ImageRef]:
    return list(tars.list_members(file, keep))


def _list_found_file(file: InputFile, keep: Sequence[str]) -> Iterator[ImageRef]:
    kind = extension(file.url)
    if kind in IMAGE_EXTENSIONS:
        return _list_single(file, keep)
    if kind in ("parquet", "pq") and image_tables.has_image_bytes(file):
        return image_tables.list_rows(file, keep)
    return iter(())


def _list_single(file: InputFile, keep: Sequence[str]) -> Iterator[ImageRef]:
    if keep:
        raise InputError(f"{file.url} is an image file and has no columns to keep, got {', '.join(keep)}")
    return iter([file.to_ref()])


def _list_parquet(file: InputFile, keep: Sequence[str]) -> Iterator[ImageRef]:
    if image_tables.has_image_bytes(file):
        return image_tables.list_rows(file, keep)
    return _list_rows(file, keep)


def _list_text(file: InputFile, keep: Sequence[str]) -> Iterator[ImageRef]:
    if keep:
        raise InputError(f"{file.url} is a text list and has no columns to keep, got {', '.join(keep)}")
    return _expand(_check_names(image_lists.read_lines(file), file), keep)


def _list_rows(file: InputFile, keep: Sequence[str]) -> Iterator[ImageRef]:
    return _expand(_check_names(image_lists.read_rows(file, keep), file), keep)


def _check_names(rows: Iterator[image_lists.Row], file: InputFile) -> Iterator[image_lists.Row]:
    """The rows of a list. InputError when none of its first names is a file: one that is missing
    is a row, but a list that was made for another folder is a mistake."""
    first = list(islice(rows, _NAMES_CHECKED))
    stores = {"file", split_protocol(file.url)[0]} - {"http", "https"}
    near = [uri for uri, _ in first if split_protocol(uri)[0] in stores]
    if first and len(near) == len(first) and not any(image_exists(uri) for uri in near):
        count = "no name" if len(first) < _NAMES_CHECKED else f"none of the first {_NAMES_CHECKED} names"
        raise InputError(
            f"{count} in {file.url} is a file: the first was looked for at {first[0][0]}. "
            "Relative names count from the folder of the list: move the list, or write full paths"
        )
    return chain(first, rows)


def _expand(rows: Iterator[image_lists.Row], keep: Sequence[str]) -> Iterator[ImageRef]:
    """Rows of a list: each names an image, or a tar whose members are meant."""
    for uri, columns in rows:
        if extension(uri) != "tar":
            yield ImageRef(uri, columns=columns)
            continue
        entry = stat_input(uri)
        if entry is None:
            raise InputError(f"{uri} does not exist")
        yield from tars.list_members(entry, keep)
