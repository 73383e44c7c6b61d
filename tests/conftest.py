"""Fixtures shared by all tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from photo_runs import command_line, photos, reference, reference_digests, user_env
from s3_fault_proxy import FaultProxy
from s3_server import S3Server

__all__ = ["command_line", "photos", "reference", "reference_digests", "user_env"]


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real S3 server; its address and keys stand in the environment, for child processes too."""
    server = S3Server(tmp_path_factory.mktemp("s3"))
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.env.items():
            patch.setenv(name, value)
        yield server
    server.stop()


@pytest.fixture
def s3_faults(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """The same server behind a proxy: set `rate`, and clients of this test see that share of calls fail."""
    proxy = FaultProxy(s3.endpoint)
    proxy.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    yield proxy
    proxy.stop()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Where the time went: the table of README.md."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.removeprefix("tests/").split("/")[0]] += report.duration
    spent = ", ".join(f"{folder} {seconds[folder]:.0f}" for folder in sorted(seconds))
    terminalreporter.write_line(f"seconds by folder: {spent}")
