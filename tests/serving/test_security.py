"""What strangers may try: a real server without Ray, hostile bodies, ids that are paths, errors that tell."""

from __future__ import annotations

import io
import struct
import zlib

import httpx
import pytest
from PIL import Image
from running_server import as_body, local_server_of, query_view
from test_api import IMAGE, with_server

LIMIT = 40_000
TELLTALES = ("/tmp", "/work", "/home", "site-packages", "Traceback", ".py", "secret")


@pytest.fixture(scope="module")
def small_server(photo_run):
    """Bodies end at 40 KB."""
    with local_server_of(photo_run, body_limit_bytes=LIMIT, encode_timeout_s=120) as running:
        yield running


def jpeg_of_many_scans(count):
    sink = io.BytesIO()
    Image.new("RGB", (64, 64)).save(sink, "JPEG", progressive=True)
    jpeg = sink.getvalue()
    last = jpeg[jpeg.rindex(b"\xff\xda") : -2]
    return jpeg[:-2] + last * count + b"\xff\xd9"


def png_of(width, height):
    """A PNG whose header promises far more than the file holds."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(b"\0" * 1000)), (b"IEND", b""))
    parts = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize(
    "image",
    [png_of(100_000, 100_000), png_of(2**31 - 1, 1), jpeg_of_many_scans(500)],
    ids=["pixels", "side", "scans"],
)
def test_images_that_would_cost_too_much_are_refused_before_they_are_decoded(small_server, image):
    for path, fields in (("/v1/search", {"json": as_body(image)}), ("/v1/preview", {"content": image})):
        headers = {"content-type": "application/octet-stream"} if "content" in fields else {}
        answer = small_server.client.post(path, headers=headers, **fields)
        assert (answer.status_code, answer.json()["error"]["state"]) == (422, "too_large")


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/search", "application/json"),
        ("/v1/search", "image/jpeg"),
        ("/v1/search", "multipart/form-data; boundary=x"),
        ("/v1/preview", "image/jpeg"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_bodies_of_every_kind_end_at_the_limit(small_server, path, kind, streamed):
    def trickle():
        for _ in range(1000):
            yield bytes(10_000)

    content = trickle() if streamed else bytes(LIMIT + 1)
    try:
        answer = small_server.client.post(path, content=content, headers={"content-type": kind})
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    except (httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError):
        pass  # the server hung up while the client was still sending: refused as well
    assert small_server.client.get("/healthz").status_code == 200


@pytest.mark.parametrize(
    "image_id",
    [
        "..%2f..%2fetc%2fpasswd",
        "%2e%2e",
        "0%00",
        "-1",
        "1e3",
        "0x10",
        "٣",
        "9" * 30,
        "0;ls",
        "null",
        "1.0.0",
    ],
)
def test_an_id_is_a_number_and_never_a_path(small_server, image_id):
    for rest in ("", "/thumbnail", "/original"):
        answer = small_server.client.get(f"/v1/images/{image_id}{rest}")
        assert answer.status_code in (400, 404), image_id
        assert answer.json()["error"]["code"] in ("bad_request", "not_found")


def test_errors_of_a_real_server_tell_nothing_of_it(small_server, photo_run):
    client = small_server.client
    answers = [
        client.post("/v1/search", json={"image": 3}),
        client.post("/v1/search", json=as_body(b"\xff\xd8\xff junk")),
        client.post("/v1/search", json=as_body(query_view("coffee")[:3000])),
        client.post("/v1/search", json=as_body(query_view("coffee"), filter="nothing>3")),
        client.post("/v1/search", json=as_body(query_view("coffee"), filter="image_id in @/etc/passwd")),
        client.post("/v1/search", json=as_body(query_view("coffee"), box=[9e9, 9e9, 9e10, 9e10])),
        client.post("/v1/search", json=as_body(query_view("coffee"), version=77)),
        client.get("/v1/images/77777"),
        client.get("/page/../../settings.py"),
        client.get("/page/%2e%2e/api.py"),
    ]
    for answer in answers:
        assert 400 <= answer.status_code < 500, answer.text
        message = answer.json()["error"]["message"].replace(answer.request.url.path, "")
        message = message.replace("/etc/passwd", "")  # what the client itself said
        assert not [word for word in (*TELLTALES, str(photo_run)) if word in message], message


def test_errors_of_parts_that_fail_tell_nothing_of_them():
    async def check(server):
        server.groups[0].failure = server.groups[1].failure = FileNotFoundError("/work/secret/shard.faiss")
        answers = [await server.search(), await server.client.get("/v1/images/0/thumbnail")]
        server.router.search = None  # a mistake of ours
        answers.append(await server.client.post("/v1/search", json={"image": IMAGE}))
        assert [answer.status_code for answer in answers] == [503, 503, 500]
        for answer in answers:
            assert not [word for word in TELLTALES if word in answer.text], answer.text

    with_server(check)


def test_a_client_cannot_change_how_long_the_server_waits(small_server):
    headers = {"x-request-timeout-seconds": "0.0001", "x-request-id": "../../etc"}
    answer = small_server.client.get("/v1/index", headers=headers)
    assert answer.status_code == 200
    assert answer.headers["x-request-id"] != "../../etc"
