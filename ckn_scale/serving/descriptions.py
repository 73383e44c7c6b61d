"""What /openapi.json says beyond what FastAPI finds by itself: bodies of several kinds, errors, files."""

from __future__ import annotations

from typing import Any

from ckn_scale.serving.forms import (
    BatchRequest,
    ErrorResponse,
    MatchRequest,
    SearchFields,
    SearchRequest,
    UriRequest,
)

FILE = {"schema": {"type": "string", "format": "binary"}}
JPEG: dict[int | str, dict[str, Any]] = {200: {"content": {"image/jpeg": FILE}}}


def errors(*statuses: int | str) -> dict[int | str, dict[str, Any]]:
    """Errors of these statuses; what asks for a key (401) may also refuse key, site (403) and host (421)."""
    guards = (403, 421) if 401 in statuses else ()
    return {status: {"model": ErrorResponse} for status in (*statuses, *guards)}


def describe_body(**content: dict[str, Any]) -> dict[str, Any]:
    return {
        "requestBody": {"required": True, "content": {kind: _inline(one) for kind, one in content.items()}}
    }


def _inline(content: dict[str, Any]) -> dict[str, Any]:
    """Definitions where they are used: OpenAPI has no `$defs` of its own below a body."""
    schema = dict(content["schema"])
    definitions = schema.pop("$defs", {})

    def resolve(part: Any) -> Any:
        if isinstance(part, dict):
            name = str(part.get("$ref", "")).rpartition("/")[2]
            return resolve(definitions[name]) if name else {key: resolve(one) for key, one in part.items()}
        return [resolve(one) for one in part] if isinstance(part, list) else part

    return {**content, "schema": resolve(schema)}


def _form_schema() -> dict[str, Any]:
    """The same fields as parts of a form."""
    fields = SearchFields.model_json_schema()
    image = {"type": "string", "format": "binary", "description": "the image file"}
    return {**fields, "properties": {"image": image, **fields["properties"]}, "required": ["image"]}


def _query_parameters(*left_out: str) -> list[dict[str, Any]]:
    """The same fields in the query string, for bodies that are the file itself."""
    fields = SearchFields.model_json_schema()["properties"]
    return [
        {
            "name": name,
            "in": "query",
            "required": False,
            "schema": {key: value for key, value in schema.items() if key != "description"},
            "description": schema["description"],
            "style": "form",
            "explode": name == "filter",
        }
        for name, schema in fields.items()
        if name not in left_out
    ]


SEARCH_BODY = {
    **describe_body(
        **{
            "application/json": {"schema": SearchRequest.model_json_schema()},
            "multipart/form-data": {"schema": _form_schema()},
            "image/*": FILE,
            "application/octet-stream": FILE,
        }
    ),
    "parameters": _query_parameters(),
}
SIMILAR_FIELDS = {"parameters": _query_parameters("box")}
MATCH_BODY = describe_body(**{"application/json": {"schema": MatchRequest.model_json_schema()}})
BATCH_BODY = describe_body(**{"application/json": {"schema": BatchRequest.model_json_schema()}})
PREVIEW_BODY = describe_body(
    **{
        "image/*": FILE,
        "application/octet-stream": FILE,
        "application/json": {"schema": UriRequest.model_json_schema()},
    }
)
