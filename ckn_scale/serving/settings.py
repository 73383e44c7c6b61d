"""What an operator may set for serving, validated before anything starts."""

from __future__ import annotations

import re

from pydantic import BaseModel, ConfigDict, Field, field_validator

from ckn_scale.serving.keys import ApiKey

MEBIBYTE = 2**20
API_KEYS_VARIABLE = "CKN_SCALE_API_KEYS"  # as keys.py says; a Kubernetes secret, never a config file
_ORIGIN = re.compile(r"\*|https?://[^/?#@\s]+")


class ServeSettings(BaseModel):
    """Settings of one serving application. Keys are held as sha256 only."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_url: str = Field(min_length=1)
    shard_groups: int = Field(default=1, ge=1)

    # Answers
    max_k: int = Field(default=1000, ge=1)
    max_batch: int = Field(default=32, ge=1)  # queries of one batch
    uri_prefixes: tuple[str, ...] = ()  # below which originals and URIs of clients are fetched; none: nothing
    encode_timeout_s: float = Field(default=30.0, gt=0)
    query_timeout_s: float = Field(default=10.0, gt=0)  # to decode a query's image; its process is ended then
    shard_timeout_s: float = Field(default=5.0, gt=0)  # a slower group is left out of the answer
    version_poll_s: float = Field(default=1.0, gt=0)  # how often a newly published version is looked for

    # Limits of the ingress
    body_limit_bytes: int = Field(default=16 * MEBIBYTE, ge=1024)
    body_timeout_s: float = Field(default=30.0, gt=0)
    body_grace_s: float = Field(default=5.0, gt=0)  # after which a body must keep a least rate
    max_bodies: int = Field(default=32, ge=1)  # arriving at once, per ingress replica; the slowest give way
    max_in_flight: int = Field(default=64, ge=1)  # searches per ingress replica; more get 429
    max_wait_s: float = Field(default=4.0, gt=0)  # who would be answered later gets 429 at once
    require_keys: bool = True
    keys: tuple[ApiKey, ...] = ()
    allowed_hosts: tuple[str, ...] = ()  # Host headers that are answered; empty: any
    allowed_origins: tuple[str, ...] = ()  # web pages of others that may ask (CORS); "*": all
    open_metrics: bool = False  # /metrics without a key; else with one of scope metrics

    # What is written down
    access_log: str | None = None  # a file for JSON lines, "-" for stderr; None: no log

    # Resources: they never change an answer
    device: str | None = None  # None: the device the run was encoded on
    query_processes: int = Field(default=2, ge=1)  # per encoder: images of queries decoded beside each other
    encoder_threads: int = Field(default=1, ge=1)  # per replica: queries, or parts of one, beside each other
    encoder_batch: int | None = Field(
        default=None, ge=1
    )  # waiting queries described together; None: by device
    shard_threads: int = Field(default=1, ge=1)
    ingress_replicas: int = Field(default=1, ge=1)
    encoder_replicas: int = Field(default=1, ge=1)
    shard_replicas: int = Field(default=1, ge=1)
    ingress_cpus: float = Field(default=1.0, ge=0)
    encoder_cpus: float | None = Field(default=None, ge=0)  # None: as many as its threads
    encoder_gpus: float = Field(default=0.0, ge=0)
    shard_cpus: float | None = Field(default=None, ge=0)

    @field_validator("allowed_origins")
    @classmethod
    def _origins_are_some(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError("an origin is https://host or https://host:port, or *")
        return origins

    @field_validator("uri_prefixes")
    @classmethod
    def _check_prefixes(cls, prefixes: tuple[str, ...]) -> tuple[str, ...]:
        for prefix in prefixes:
            protocol, separator, rest = prefix.partition("://")
            is_url = bool(separator and rest.strip("/")) and protocol.lower() not in ("file", "local")
            if "::" in prefix or not (is_url or prefix.startswith("/")):
                raise ValueError("a prefix is an absolute path, or a URL such as s3://bucket/photos/")
        return prefixes
