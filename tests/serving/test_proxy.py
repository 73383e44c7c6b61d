"""What is put around the application inside Serve's proxy. No Ray."""

from __future__ import annotations

import asyncio

import httpx

from ckn_scale.serving.proxy import set_up_proxy


async def answering(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"here"})


async def silent(scope, receive, send):
    """As Serve's proxy is when the replica that had the request died."""


def get_through_proxy(app):
    (middleware,) = set_up_proxy()
    wrapped = middleware.cls(app, *middleware.args, **middleware.kwargs)

    async def get():
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(wrapped), base_url="http://host"
        ) as client:
            return await client.get("/v1/index")

    return asyncio.run(get())


def test_answers_pass_and_a_lost_request_is_told_to_come_again():
    assert get_through_proxy(answering).text == "here"
    lost = get_through_proxy(silent)
    assert (lost.status_code, lost.headers["retry-after"]) == (503, "1")
    assert lost.json()["error"]["code"] == "unavailable"
