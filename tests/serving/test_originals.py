"""What the server fetches by itself: only what lies below listed prefixes, however it is written."""

from __future__ import annotations

import asyncio
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from ckn_scale.core.images import encode_jpeg
from ckn_scale.serving.limits import ApiError
from ckn_scale.serving.originals import Originals, PublicResolver, is_public
from ckn_scale.serving.settings import ServeSettings

JPEG = encode_jpeg(np.full((8, 8, 3), 90, np.uint8), 90)


def read(originals, uri):
    return asyncio.run(originals.read(uri))


def assert_refused(originals, uri, status=403):
    with pytest.raises(ApiError) as refused:
        read(originals, uri)
    assert refused.value.status == status
    assert "/" not in refused.value.body["message"], "no path in an error"


@pytest.fixture
def folder(tmp_path):
    for name in ("open/a.jpg", "open/deep/b.jpg", "opened/c.jpg", "secret.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(JPEG)
    (tmp_path / "open/text.jpg").write_text("no image")
    (tmp_path / "open/out.jpg").symlink_to(tmp_path / "secret.jpg")
    (tmp_path / "open/up").symlink_to(tmp_path)
    (tmp_path / "open/same.jpg").symlink_to(tmp_path / "open/a.jpg")
    return tmp_path


def test_files_below_a_prefix_are_read(folder):
    originals = Originals([f"{folder}/open"])
    for name in ("a.jpg", "deep/b.jpg", "same.jpg"):
        file = read(originals, f"{folder}/open/{name}")
        assert (file.data, file.media_type) == (JPEG, "image/jpeg")


@pytest.mark.parametrize(
    "name",
    [
        "secret.jpg",
        "opened/c.jpg",
        "open/../secret.jpg",
        "open/out.jpg",
        "open/up/secret.jpg",
        "open/./a.jpg",
    ],
)
def test_what_lies_elsewhere_is_refused(folder, name):
    assert_refused(Originals([f"{folder}/open"]), f"{folder}/{name}")


@pytest.mark.parametrize(
    "uri",
    [
        "file://{}/open/a.jpg", "local://{}/open/a.jpg", "simplecache::{}/open/a.jpg", "open/a.jpg",
        "{}/open/a.jpg\0", "{}/secret.tar#open/a.jpg", "s3://bucket/a.jpg", "http://127.0.0.1/a.jpg",
    ],
)  # fmt: skip
def test_other_protocols_are_refused(folder, uri):
    assert_refused(Originals([f"{folder}/open"]), uri.format(folder))


def test_what_is_gone_or_no_image_is_not_found(folder):
    for name in ("gone.jpg", "text.jpg", "deep"):
        assert_refused(Originals([f"{folder}/open"]), f"{folder}/open/{name}", 404)


def test_nothing_is_allowed_by_default(folder):
    assert not Originals([]).allows(f"{folder}/open/a.jpg")


@pytest.mark.parametrize("prefix", ["photos/", "file:///data/", "s3://", "zip::s3://bucket/a", ""])
def test_a_prefix_that_means_nothing_is_refused(prefix):
    with pytest.raises(ValueError, match="a prefix is an absolute path, or a URL"):
        ServeSettings(run_url="run", uri_prefixes=(prefix,))


class Web(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path.startswith("/open/to"):
            self.send_response(302)
            self.send_header("Location", {"/open/to-b": "/open/b.jpg"}.get(self.path, "/secret.jpg"))
            self.end_headers()
            return
        self.send_response(200 if self.path.endswith(".jpg") else 404)
        self.end_headers()
        self.wfile.write(JPEG)

    def log_message(self, *arguments):
        pass


@pytest.fixture
def web():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Web)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_the_web_is_read_below_a_prefix_and_so_is_what_it_redirects_to(web):
    originals = Originals([f"{web}/open/"])
    assert read(originals, f"{web}/open/a.jpg").data == JPEG
    assert read(originals, f"{web}/open/to-b").data == JPEG
    assert_refused(originals, f"{web}/open/to-secret", 404)
    assert_refused(originals, f"{web}/open/gone", 404)
    dots = ("..", "%2e%2e", "%252e%252e", "..%5c")
    for path in ("/secret.jpg", "/open/a.tar#b.jpg", *(f"/open/{one}/secret.jpg" for one in dots)):
        assert_refused(originals, f"{web}{path}")


def test_names_of_private_addresses_stand_for_nothing():
    assert is_public("8.8.8.8")
    for address in ("10.1.2.3", "169.254.169.254", "127.0.0.1", "::1", "fe80::1%eth0"):
        assert not is_public(address)

    async def resolve(host):
        resolver = PublicResolver()
        try:
            return await resolver.resolve(host, 80)
        finally:
            await resolver.close()

    assert asyncio.run(resolve("127.0.0.1")) == []
    assert asyncio.run(resolve("localhost"))
