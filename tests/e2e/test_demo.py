"""`make demo` as a new user calls it: the default preset, its own gate, and every answer."""

from __future__ import annotations

import json

from ray_head import free_ports


def test_demo_publishes_serves_and_finds_every_photograph(command_line, tmp_path):
    folder = tmp_path / "demo"
    (port,) = free_ports(1)
    done = command_line("demo", "--once", "--folder", folder, "--port", str(port))
    assert done.returncode == 0, done.stderr
    assert "20 of 20 queries" in done.stdout
    assert (folder / "contact_sheet.png").stat().st_size > 50_000
    status = json.loads(command_line("status", folder / "run", "--json").stdout)
    certificate = status["certificate"]
    assert certificate["passed"]
    assert not certificate["accepted"]
    assert certificate["queries"] == 70
    assert certificate["first"] >= 67
