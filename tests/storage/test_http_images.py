"""Images behind URLs: what each kind of host does to one row, and never to the rows beside it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from web_hosts import WebHost, dead_url

from ckn_scale.errors import ImageRejected
from ckn_scale.storage import image_sources
from ckn_scale.storage.http_images import HttpImages, HttpPolicy
from ckn_scale.storage.image_sources import read_image
from ckn_scale.storage.retries import RetryPolicy

SPAN = "512+10@"  # as a tar member is listed
QUICK = HttpPolicy(pause_s=0.01, connect_s=5, silence_s=0.3, deadline_s=5, max_bytes=1 << 20)


@pytest.fixture
def host():
    with WebHost() as running:
        yield running


@pytest.fixture
def http():
    with HttpImages(QUICK) as images:
        yield images


def rejection(http: HttpImages, url: str, etag: str = "") -> ImageRejected:
    with pytest.raises(ImageRejected) as caught:
        read_image(url, etag=etag, http=http)
    return caught.value


def test_images_come_whole_and_after_a_while(host, http):
    assert read_image(f"{host.url}/a.jpg", http=http) == b"image"
    assert read_image(f"{host.url}/status/503/2/a.jpg", http=http) == b"image"
    assert host.asked["/status/503/2/a.jpg"] == 3


def test_read_image_of_a_single_url(host):
    assert read_image(f"{host.url}/a.jpg") == b"image"


@pytest.mark.parametrize("status", [404, 410])
def test_not_found_is_missing(host, http, status):
    assert rejection(http, f"{host.url}/status/{status}").state == "missing"
    assert host.asked[f"/status/{status}"] == 1


@pytest.mark.parametrize(("status", "tries"), [(401, 1), (403, 1), (451, 1), (429, 3), (500, 3), (503, 3)])
def test_refusals_are_unreachable_and_retried_where_they_may_pass(host, http, status, tries):
    rejected = rejection(http, f"{host.url}/status/{status}")
    assert (rejected.state, host.asked[f"/status/{status}"]) == ("unreachable", tries)
    assert f"HTTP {status}" in rejected.reason
    assert read_image(f"{host.url}/a.jpg", http=http) == b"image"


@pytest.mark.parametrize(
    "make_url", [dead_url, lambda: "http://no-such-host.invalid/a.jpg", lambda: "http://[/a.jpg"]
)
def test_hosts_that_are_not_there_are_unreachable(http, make_url):
    assert rejection(http, make_url()).state == "unreachable"


def test_a_dead_host_is_tried_for_one_image_of_a_shard_only(http):
    with WebHost() as host:
        pass  # it listened, and is gone
    assert "tried 3 times" in rejection(http, f"{host.url}/a.jpg").reason
    assert "given up before" in rejection(http, f"{host.url}/b.jpg").reason


def test_a_silent_host_is_given_up_and_a_silent_page_is_not_its_host(host, http):
    assert read_image(f"{host.url}/a.jpg", http=http) == b"image"
    assert rejection(http, f"{host.url}/silent/a.jpg").state == "unreachable"
    assert read_image(f"{host.url}/b.jpg", http=http) == b"image"
    with HttpImages(QUICK) as another:
        assert rejection(another, f"{host.url}/silent/a.jpg").state == "unreachable"
        assert "given up before" in rejection(another, f"{host.url}/b.jpg").reason


def test_a_body_that_is_cut_is_unreachable(host, http):
    rejected = rejection(http, f"{host.url}/cut/a.jpg")
    assert (rejected.state, host.asked["/cut/a.jpg"]) == ("unreachable", 3)


@pytest.mark.parametrize("path", ["/endless", "/promise"])
def test_bodies_beyond_the_limit_are_too_large(host, http, path):
    rejected = rejection(http, f"{host.url}{path}")
    assert rejected.state == "too_large"
    assert "1 MiB" in rejected.reason


def test_a_url_has_one_deadline_with_all_its_tries(host):
    with HttpImages(HttpPolicy(silence_s=30, deadline_s=0.5)) as http:
        assert "within 0.5 s" in rejection(http, f"{host.url}/silent/a.jpg").reason


def test_redirects_are_few_and_lead_to_the_web_only(host, http):
    assert read_image(f"{host.url}/redirect/5/a.jpg", http=http) == b"image"
    assert "more than 5 redirects" in rejection(http, f"{host.url}/redirect/6/a.jpg").reason
    rejected = rejection(http, f"{host.url}/leave")
    assert rejected.state == "unreachable"
    assert "'file:///etc/passwd', which is not http(s)" in rejected.reason


@pytest.mark.parametrize("path", ["together/8", "apart/9"])
def test_eight_fetches_at_once_from_one_host_and_no_more(host, http, path):
    urls = [f"{host.url}/{path}/{number}.jpg" for number in range(24)]
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(http.read, urls)) == [b"image"] * 24
    assert host.most_at_once <= 8


def test_a_tar_on_a_dead_host_is_unreachable_too(http, monkeypatch):
    monkeypatch.setattr(image_sources, "_READ_RETRY", RetryPolicy(attempts=2, first_delay_s=0))
    tar = dead_url("0.tar")
    assert rejection(http, f"{tar}#a.jpg", SPAN).state == "unreachable"
    assert "given up before" in rejection(http, f"{tar}#b.jpg", SPAN).reason


def test_a_tar_that_is_refused_is_unreachable(host, http, monkeypatch):
    monkeypatch.setattr(image_sources, "_READ_RETRY", RetryPolicy(attempts=2, first_delay_s=0))
    for status, state in ((403, "unreachable"), (404, "missing")):
        assert rejection(http, f"{host.url}/status/{status}/99/0.tar#a.jpg", SPAN).state == state
