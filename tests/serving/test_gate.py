"""Who is answered: keys, their scopes and rates, hosts, web pages of other sites; HEAD and Allow. No Ray."""

from __future__ import annotations

import hmac

import pytest
from test_api import IMAGE, assert_error, with_server

from ckn_scale.errors import InputError, SettingsError
from ckn_scale.serving import keys as api_keys
from ckn_scale.serving import limits
from ckn_scale.serving.app import resolve_access
from ckn_scale.serving.keys import hash_key, parse_keys


def bearer(key):
    return {"authorization": f"Bearer {key}"}


def test_keys_guard_the_api_and_nothing_else():
    async def check(server):
        for headers in (None, {"authorization": "Bearer wrong"}, {"authorization": "Basic right"}):
            answer = await server.search(headers=headers)
            assert_error(answer, 401, "unauthorized", "Authorization: Bearer")
            assert answer.headers["www-authenticate"] == "Bearer"
        assert (await server.client.get("/v1/images/0/thumbnail")).status_code == 401
        for key in ("right", "other"):
            assert (await server.search(headers={"authorization": f"Bearer {key}"})).status_code == 200
        for path in ("/", "/healthz", "/readyz", "/page/page.js"):
            assert (await server.client.get(path)).status_code == 200

    with_server(check, require_keys=True, keys=parse_keys(["right", " other "]))


def test_required_keys_without_any_let_nobody_in():
    async def check(server):
        assert (await server.search(headers={"authorization": "Bearer "})).status_code == 401

    with_server(check, require_keys=True)


def test_a_loopback_server_answers_loopback_names_only():
    async def check(server):
        assert (await server.search()).status_code == 200
        assert (await server.search(headers={"host": "localhost:8000"})).status_code == 200
        assert (await server.search(headers={"host": "[::1]:8000"})).status_code == 200
        assert_error(await server.search(headers={"host": "evil.example"}), 421, "wrong_host", "evil.example")

    with_server(check, allowed_hosts=("127.0.0.1", "localhost", "[::1]"))


def test_whatever_is_not_listed_as_open_needs_a_key():
    async def check(server):
        for path in ("/v1/nothing", "/nothing", "/metrics", "//v1/search", "/V1/search", "/page", "/v2/x"):
            assert (await server.client.get(path)).status_code == 401
        server.client._transport.root_path = "/below"  # an application that is mounted below a prefix
        assert (await server.client.post("/below/v1/search", json={})).status_code == 401
        assert (await server.client.get("/below/healthz")).status_code == 200

    with_server(check, require_keys=True, keys=parse_keys(["right"]))


def test_a_key_opens_what_its_scope_says():
    async def check(server):
        refused = await server.search(headers=bearer("m"))
        assert_error(refused, 403, "forbidden", "for metrics", "scope=search")
        assert_error(await server.client.get("/metrics", headers=bearer("s")), 403, "forbidden")
        for key in ("s", "both"):
            assert (await server.search(headers=bearer(key))).status_code == 200

    keys = parse_keys(["s", "m scope=metrics", "both scope=search+metrics"])
    with_server(check, require_keys=True, keys=keys)


def test_metrics_are_closed_where_searches_are_open():
    async def check(server):
        assert (await server.search()).status_code == 200
        assert (await server.client.get("/metrics")).status_code == 401

    with_server(check)


def test_every_known_key_is_compared_in_constant_time(monkeypatch):
    compared = []

    def compare(given, known):
        compared.append(known)
        return hmac.compare_digest(given, known)

    monkeypatch.setattr(api_keys, "hmac", type("Watched", (), {"compare_digest": staticmethod(compare)}))
    keys = parse_keys(["first", "second", "third"])
    assert api_keys.find_key("first", keys) == keys[0]
    assert api_keys.find_key("fourth", keys) is None
    assert compared == 2 * [key.sha256 for key in keys]


def test_a_key_that_asks_too_often_is_told_when_to_come_back(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(limits.time, "monotonic", lambda: clock[0])
    keys = parse_keys(["slow rate=2/min", "free"])
    rates = limits.RateLimiter(keys)
    for _ in range(2):
        rates.charge(keys[0])
    with pytest.raises(limits.ApiError, match=r"2 times in 60 s: try again in 30\.0 s") as refused:
        rates.charge(keys[0])
    assert (refused.value.status, refused.value.headers) == (429, {"retry-after": "30"})
    clock[0] += 30
    rates.charge(keys[0])
    rates.charge_more(keys[0], 3)  # a batch of four
    clock[0] += 90
    with pytest.raises(limits.ApiError):
        rates.charge(keys[0])
    clock[0] += 30
    rates.charge(keys[0])
    for _ in range(100):
        rates.charge(keys[1])
    shared = limits.RateLimiter(keys, replicas=2)
    shared.charge(keys[0])
    with pytest.raises(limits.ApiError):
        shared.charge(keys[0])


def test_searches_count_for_a_rate_and_thumbnails_do_not():
    async def check(server):
        assert (await server.search(headers=bearer("slow"))).status_code == 200
        refused = await server.search(headers=bearer("slow"))
        assert_error(refused, 429, "rate_limited", "1 times in 3600 s")
        assert 3590 < int(refused.headers["retry-after"]) <= 3600
        thumbnail = await server.client.get("/v1/images/10/thumbnail", headers=bearer("slow"))
        assert thumbnail.status_code == 200
        assert (await server.search(headers=bearer("free"))).status_code == 200
        batch = {"queries": 3 * [{"image": IMAGE}]}
        asked = await server.client.post("/v1/search:batch", json=batch, headers=bearer("three"))
        assert len(asked.json()["results"]) == 3
        assert (await server.search(headers=bearer("three"))).status_code == 429

    with_server(check, require_keys=True, keys=parse_keys(["slow rate=1/h", "three rate=3/h", "free"]))


def test_lines_of_a_key_file():
    lines = [
        "# ours",
        "",
        "a key with spaces",
        f"sha256:{hash_key('k')} rate=5/s",
        "m rate=7/min scope=metrics",
    ]
    plain, hashed, metrics = parse_keys(lines)
    assert plain.sha256 == hash_key("a key with spaces")
    assert (plain.scopes, plain.count) == (("search",), None)
    assert (hashed.sha256, hashed.count, hashed.period_s) == (hash_key("k"), 5, 1.0)
    assert (metrics.scopes, metrics.count, metrics.period_s) == (("metrics",), 7, 60.0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("k3y scope=all", "API key 2: scope is search, metrics or search.metrics, got 'all'"),
        ("k3y scope=", "API key 2: scope"),
        ("k3y rate=0/s", "API key 2: a rate is a number per s, min or h, as rate=5/s, got '0/s'"),
        ("k3y rate=5", "API key 2: a rate"),
        ("k3y rate=1/s rate=2/s", "API key 2 has two options rate="),
        ("rate=5/s", "API key 2 has options and no key"),
        ("sha256:k3y", "API key 2 begins with sha256:, and 64 hexadecimal digits must follow"),
        ("first", "API key 2 is there twice"),
    ],
)
def test_a_line_that_is_no_key_is_refused_without_showing_it(line, message):
    with pytest.raises(InputError, match=message) as refused:
        parse_keys(["first", line])
    assert "k3y" not in str(refused.value)


def test_head_is_get_without_the_body_and_405_says_what_is_allowed():
    async def check(server):
        for path in ("/", "/healthz", "/readyz", "/openapi.json", "/page/page.js", "/v1/images/0/thumbnail"):
            head, get = await server.client.head(path), await server.client.get(path)
            assert (head.status_code, head.content) == (200, b"")
            for name in ("content-length", "content-type"):
                assert head.headers[name] == get.headers[name]
        head = await server.client.head("/v1/images/99/thumbnail")
        assert (head.status_code, head.content) == (404, b"")
        for method, path, allowed in (
            ("HEAD", "/v1/search", {"POST"}),
            ("GET", "/v1/search", {"POST"}),
            ("DELETE", "/v1/search", {"POST"}),
            ("POST", "/healthz", {"GET", "HEAD"}),
            ("PUT", "/v1/images/0/thumbnail", {"GET", "HEAD"}),
            ("OPTIONS", "/v1/search", {"POST"}),
        ):
            answer = await server.client.request(method, path)
            assert answer.status_code == 405
            assert set(answer.headers["allow"].split(", ")) == allowed

    with_server(check)


def from_page(origin, site="cross-site", **more):
    return {"origin": origin, "sec-fetch-site": site, "sec-fetch-mode": "cors", **more}


def test_pages_of_other_sites_are_refused_and_get_no_permission():
    async def check(server):
        for site in ("cross-site", "same-site"):
            answer = await server.search(headers=from_page("https://evil.example", site))
            assert_error(answer, 403, "wrong_origin", "--allow-origin")
            assert not server.encoder.versions
        image = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}
        assert (await server.client.get("/v1/images/0/thumbnail", headers=image)).status_code == 403
        link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
        assert (await server.client.get("/", headers=link)).status_code == 200
        for headers in (
            from_page("http://127.0.0.1:8000", "same-origin"),
            {"origin": "https://evil.example"},
        ):
            answer = await server.search(headers=headers)
            assert answer.status_code == 200
            assert not [name for name in answer.headers if name.startswith("access-control")]

    with_server(check)


def test_listed_origins_may_ask_and_read_errors():
    async def check(server):
        asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        preflight = from_page("https://ours.example", **asks)
        answer = await server.client.options("/v1/search", headers=preflight)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "https://ours.example"
        assert "authorization" in answer.headers["access-control-allow-headers"]
        refused = await server.search(headers=from_page("https://ours.example"))
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://ours.example"
        asked = await server.search(headers=from_page("https://ours.example", **bearer("right")))
        assert asked.status_code == 200
        assert "access-control-allow-credentials" not in asked.headers
        other = await server.search(headers=from_page("https://ours.example.evil", **bearer("right")))
        assert other.status_code == 403

    origins = ("https://ours.example",)
    with_server(check, allowed_origins=origins, require_keys=True, keys=parse_keys(["right"]))


@pytest.mark.parametrize("origin", ["ours.example", "https://ours.example/", "https://a@b", "ftp://a", ""])
def test_what_is_no_origin_is_refused(origin):
    values = {"run_url": "run", "allowed_origins": (origin,)}
    with pytest.raises(SettingsError, match="an origin is https://host"):
        resolve_access("127.0.0.1", [], values, insecure=False)


def test_every_answer_has_a_request_id_and_takes_a_usable_one():
    async def check(server):
        first, second = await server.search(), await server.client.get("/nothing")
        assert first.headers["x-request-id"] != second.headers["x-request-id"]
        for given, kept in (("abc-1", True), ("a b", False), ("x" * 65, False), ("<script>", False)):
            answer = await server.client.get("/healthz", headers={"x-request-id": given})
            assert (answer.headers["x-request-id"] == given) is kept

    with_server(check)


def test_no_byte_of_a_body_follows_the_headers_of_head():
    async def check(server):
        sent = []

        async def send(message):
            sent.append(message)

        async def receive():
            return {"type": "http.request", "body": b"", "more_body": False}

        scope = {"type": "http", "method": "HEAD", "path": "/healthz", "headers": [], "query_string": b""}
        await server.client._transport.app(scope, receive, send)
        assert sent[0]["status"] == 200
        assert [message["body"] for message in sent[1:]] == [b""]

    with_server(check)
