"""What /openapi.json promises, held against what a real server answers: schemathesis, bounded."""

from __future__ import annotations

import contextlib

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from running_server import KEY, as_body, query_view
from schemathesis import GenerationMode, checks
from schemathesis.specs.openapi import checks as openapi

EXAMPLES = 12  # of each operation and mode, the same ones each time
# Not that whatever fits the schema is accepted: of a text no schema says that it is an image.
CHECKS = [
    checks.not_a_server_error,
    openapi.status_code_conformance,
    openapi.content_type_conformance,
    openapi.response_schema_conformance,
    openapi.response_headers_conformance,
    openapi.negative_data_rejection,
    openapi.allow_header_conformance,
]
HEADERS = {"authorization": f"Bearer {KEY}"}


def test_every_operation_answers_what_it_describes(local_server):
    schema = schemathesis.openapi.from_url(f"{local_server.url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) > 5
    statuses = {
        operation.label: set().union(*(answer_cases(operation, mode) for mode in GenerationMode))
        for operation in operations
    }
    assert statuses["POST /v1/search"] >= {200, 400}
    assert all(statuses.values())


def answer_cases(operation, mode):
    # A batch is answered though one of its queries is wrong, which is said in that one's place.
    in_place = [openapi.negative_data_rejection] if operation.path.endswith(":batch") else []
    expected = [check for check in CHECKS if check not in in_place]
    statuses, view = set(), as_body(query_view("coffee"))["image"]

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(case=operation.as_strategy(mode), with_image=st.booleans())
    def answer(case, with_image):
        is_search = case.media_type == "application/json" and isinstance(case.body, dict)
        if with_image and mode is GenerationMode.POSITIVE and is_search and operation.path == "/v1/search":
            case.body, case.query = {"image": view, "k": 3}, {}
        response = case.call(headers=HEADERS)
        statuses.add(response.status_code)
        case.validate_response(response, checks=expected)

    with contextlib.suppress(Unsatisfiable):  # nothing can be wrong with a request that has no parameter
        answer()
    return statuses
