from __future__ import annotations

import asyncio
import errno

import pytest
from aiohttp import ClientPayloadError, ServerDisconnectedError
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError, ReadTimeoutError
from s3fs.errors import translate_boto_error

from ckn_scale.errors import TransientStoreError
from ckn_scale.storage.retries import RetryPolicy, call_with_retries, is_refused, is_transient

NO_WAIT = RetryPolicy(attempts=3, first_delay_s=0, max_delay_s=0)


def s3_error(status: int, code: str) -> Exception:
    response = {"Error": {"Code": code, "Message": "m"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return translate_boto_error(ClientError(response, "PutObject"))


@pytest.mark.parametrize(
    "error",
    [
        s3_error(500, "InternalError"),
        s3_error(502, "BadGateway"),
        s3_error(503, "SlowDown"),
        s3_error(409, "ConditionalRequestConflict"),
        s3_error(409, "OperationAborted"),
        s3_error(429, "TooManyRequests"),
        s3_error(400, "RequestTimeout"),
        s3_error(400, "IncompleteBody"),
        TimeoutError(),
        asyncio.TimeoutError(),
        ConnectionResetError(),
        BrokenPipeError(),
        OSError(errno.ESTALE, "stale"),
        ReadTimeoutError(endpoint_url="http://x"),
        EndpointConnectionError(endpoint_url="http://x"),
        ServerDisconnectedError(),
        ClientPayloadError(),
    ],
    ids=repr,
)
def test_is_transient_of_what_may_pass(error):
    assert is_transient(error)


@pytest.mark.parametrize(
    "error",
    [
        s3_error(403, "AccessDenied"),
        s3_error(404, "NoSuchKey"),
        s3_error(404, "NoSuchBucket"),
        s3_error(412, "PreconditionFailed"),
        s3_error(501, "NotImplemented"),
        FileNotFoundError(),
        PermissionError(),
        OSError(errno.ENOSPC, "full"),
        NoCredentialsError(),
        ValueError(),
    ],
    ids=repr,
)
def test_is_transient_of_what_will_not_pass(error):
    assert not is_transient(error)


@pytest.mark.parametrize(
    "error", [s3_error(403, "SignatureDoesNotMatch"), NoCredentialsError(), PermissionError()]
)
def test_is_refused_of_credentials(error):
    assert is_refused(error)


def test_call_with_retries_counts_attempts():
    calls = []

    def fail():
        calls.append(1)
        raise TimeoutError

    with pytest.raises(TransientStoreError, match="s3://b/k"):
        call_with_retries(fail, NO_WAIT, "s3://b/k")
    assert len(calls) == NO_WAIT.attempts


def test_call_with_retries_passes_not_found_on():
    def fail():
        raise FileNotFoundError("k")

    with pytest.raises(FileNotFoundError):
        call_with_retries(fail, NO_WAIT, "k")


def test_delays_double_with_jitter_up_to_a_bound():
    policy = RetryPolicy(attempts=6, first_delay_s=1.0, max_delay_s=4.0)
    steps = [1.0, 2.0, 4.0, 4.0, 4.0]
    delays = list(policy.delays_s())
    assert all(step / 2 <= delay <= step for step, delay in zip(steps, delays, strict=True))
    assert delays != list(policy.delays_s())
