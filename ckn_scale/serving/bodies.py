"""From the body of a request to the image in it and what is asked about it.

    application/json            {"image": base64 or a data URL, "k": 10, …}
    multipart/form-data         a file part "image", the other fields as text or JSON
    image/*, octet-stream       the image file itself, the other fields in the query string

Fields of the query string count with any body; what the body says comes first.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from python_multipart import FormParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from ckn_scale.serving.forms import MatchRequest, SearchFields
from ckn_scale.serving.limits import ApiError
from ckn_scale.serving.messages import Box

Form = TypeVar("Form", bound=BaseModel)
WHITESPACE = b" \t\r\n"
MAX_PARTS = 32


def media_type_of(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def is_image_file(media_type: str) -> bool:
    """Whether such a body is the file itself."""
    return media_type.startswith("image/") or media_type == "application/octet-stream"


def parse_search(
    body: bytes, content_type: str, asked: Iterable[tuple[str, str]], max_k: int
) -> tuple[SearchFields, bytes]:
    """The fields of a search and its image's bytes; ApiError 400 or 415 saying what is wrong."""
    media_type, fields = media_type_of(content_type), parse_texts(asked)
    if is_image_file(media_type):
        return check_search(fields, max_k), body
    if media_type == "multipart/form-data":
        texts, image = parse_multipart(body, content_type)
        return check_search({**fields, **parse_texts(texts)}, max_k), image
    if media_type != "application/json":
        raise unsupported(media_type, "application/json, multipart/form-data, image/* or octet-stream")
    fields |= parse_object(body)
    image = decode_image_text(fields.pop("image", None))
    return check_search(fields, max_k), image


@dataclass(frozen=True)
class Batch:
    """Searches of one version; those that cannot be read are errors already."""

    queries: list[tuple[SearchFields, bytes] | ApiError]
    version: int | None


def parse_batch(body: bytes, content_type: str, max_k: int, max_batch: int) -> Batch:
    media_type = media_type_of(content_type)
    if media_type != "application/json":
        raise unsupported(media_type, "application/json")
    asked = parse_object(body)
    queries = asked.pop("queries", None)
    if not isinstance(queries, list) or not 1 <= len(queries) <= max_batch:
        count = f"{len(queries)}" if isinstance(queries, list) else "none"
        raise bad_request(f"queries must be a list of 1 to {max_batch} searches, got {count}")
    checked = check_form(SearchFields, {name: asked[name] for name in asked if name == "version"})
    if asked.keys() - {"version"}:
        raise bad_request(f"a batch has queries and version, got also {sorted(asked.keys() - {'version'})}")
    return Batch([_parse_query(query, max_k) for query in queries], checked.version)


def _parse_query(query: Any, max_k: int) -> tuple[SearchFields, bytes] | ApiError:
    try:
        if not isinstance(query, dict):
            raise bad_request(f"a query must be a JSON object, got {type(query).__name__}")
        fields = dict(query)
        image = decode_image_text(fields.pop("image", None))
        if fields.get("version") is not None:
            raise bad_request("version: a batch has one for all of its queries, beside them")
        return check_search(fields, max_k), image
    except ApiError as error:
        return error


def parse_match(body: bytes, content_type: str) -> tuple[bytes | int, bytes | int, Box | None]:
    """The two images of a match, files or ids, and the part of the first."""
    media_type = media_type_of(content_type)
    if media_type != "application/json":
        raise unsupported(media_type, "application/json")
    asked = check_form(MatchRequest, parse_object(body))
    images: list[bytes | int] = []
    for name, text in (("image", asked.image), ("other", asked.other)):
        if text is not None:
            images.append(decode_image_text(text, name))
    images += [one for one in (asked.image_id, asked.other_id) if one is not None]
    one, other = images
    return one, other, asked.box


def check_search(fields: Mapping[str, Any], max_k: int) -> SearchFields:
    checked = check_form(SearchFields, fields)
    if checked.k > max_k:
        raise bad_request(f"k must be ≤ {max_k}, got {checked.k}")
    if checked.k + checked.offset > max_k:
        raise bad_request(f"k and offset together must be ≤ {max_k}, got {checked.k + checked.offset}")
    return checked


def check_form(form: type[Form], fields: Mapping[str, Any]) -> Form:
    try:
        return form.model_validate(fields)
    except ValidationError as error:
        raise bad_request(describe_invalid(error.errors(include_input=False)[0])) from None


def parse_object(body: bytes) -> dict[str, Any]:
    """A JSON object."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        raise bad_request("the body must be a JSON object: it is no JSON") from None
    if not isinstance(found, dict):
        raise bad_request(f"the body must be a JSON object, got {type(found).__name__}")
    return found


def decode_image_text(text: Any, name: str = "image") -> bytes:
    """The bytes of base64, also with whitespace in it or as a data URL."""
    if not isinstance(text, str):
        missing = "is missing: an image file, base64" if text is None else "must be base64 of an image file"
        raise bad_request(f"{name} {missing}")
    if text[:5].lower() == "data:":
        head, comma, text = text.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise bad_request(f"{name}: a data URL must say ;base64, and hold it")
    try:
        return base64.b64decode(text.encode("ascii").translate(None, WHITESPACE), validate=True)
    except (binascii.Error, ValueError):
        raise bad_request(f"{name} must be base64 of an image file") from None


def parse_texts(pairs: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Fields given as text, in a query string or form: numbers and yes or no are read when checked."""
    fields: dict[str, Any] = {}
    for name, text in pairs:
        if name == "filter":
            fields.setdefault(name, []).extend(_parse_filters(text))
        elif name in fields:
            raise bad_request(f"{name} is given twice")
        elif name == "box":
            fields[name] = _parse_box(text)
        else:
            fields[name] = None if text == "null" else text
    return fields


def _parse_filters(text: str) -> list[Any]:
    if not text.startswith("["):
        return [text]
    try:
        found: list[Any] = json.loads(text)
    except (ValueError, RecursionError):
        raise bad_request("filter: a list of them must be JSON") from None
    return found


def _parse_box(text: str) -> list[str]:
    return [part.strip() for part in text.strip().removeprefix("[").removesuffix("]").split(",")]


def parse_multipart(body: bytes, content_type: str) -> tuple[list[tuple[str, str]], bytes]:
    """The text fields of a form, and the file in its part `image`."""
    boundary = parse_options_header(content_type)[1].get(b"boundary")
    if not boundary:
        raise bad_request("a multipart body needs a boundary in its content-type")
    texts: list[tuple[str, str]] = []
    images: list[bytes] = []

    def count_part() -> None:
        if len(texts) + len(images) >= MAX_PARTS:
            raise FormParserError("too many parts")

    def on_field(field: Any) -> None:
        count_part()
        texts.append((field.field_name.decode(), (field.value or b"").decode()))

    def on_file(file: Any) -> None:
        count_part()
        if file.field_name != b"image" or images:
            raise FormParserError("one file is taken, in the part image")
        file.file_object.seek(0)
        images.append(file.file_object.read())

    try:
        # Larger than any body, so that nothing goes to a temporary file.
        config = {"MAX_MEMORY_FILE_SIZE": len(body) + 1}
        parser = FormParser("multipart/form-data", on_field, on_file, boundary=boundary, config=config)
        parser.write(body)
        parser.finalize()
    except (FormParserError, UnicodeDecodeError) as error:
        raise bad_request(f"the multipart body cannot be read: {error}") from None
    if not images:
        raise bad_request("the form has no file part image")
    return texts, images[0]


def describe_invalid(complaint: Mapping[str, Any]) -> str:
    """The field's name and what is wrong, without the value: an image is long."""
    where = ".".join(str(part) for part in complaint["loc"])
    return f"{where}: {complaint['msg']}" if where else complaint["msg"]


def bad_request(message: str) -> ApiError:
    return ApiError(400, "bad_request", message)


def unsupported(media_type: str, taken: str) -> ApiError:
    message = f"the body's content-type must be {taken}, got {media_type or 'none'!r}"
    return ApiError(415, "unsupported_media_type", message)
