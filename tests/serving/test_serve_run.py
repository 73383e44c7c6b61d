"""What serve_run and build_app refuse, and that they do so before Ray starts."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest
from synthetic_index import publish_synthetic, random_units

from ckn_scale.errors import InputError, SettingsError
from ckn_scale.serving.app import build_app, check_port, is_loopback, resolve_access, serve_run
from ckn_scale.serving.keys import hash_key
from ckn_scale.storage.run_folder import RunFolder


@pytest.fixture(scope="module")
def run_url(tmp_path_factory):
    url = tmp_path_factory.mktemp("refused") / "run"
    publish_synthetic(url, random_units(6), 2)
    return str(url)


@pytest.fixture
def taken_port():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


def test_a_port_in_use_is_refused(run_url, taken_port):
    with pytest.raises(InputError, match=f"cannot listen on 127.0.0.1:{taken_port}: the port is in use"):
        serve_run(run_url, port=taken_port)


@pytest.mark.parametrize(
    ("host", "port"), [("203.0.113.7", 8000), ("no-such-host.invalid", 8000), ("127.0.0.1", 70000)]
)
def test_addresses_nobody_can_listen_on_are_refused(host, port):
    with pytest.raises(InputError, match=f"{host}:{port}|between 1 and 65535, got {port}"):
        check_port(host, port)


def test_a_missing_run_and_an_unpublished_one_are_refused(tmp_path):
    with pytest.raises(InputError, match="is not a run folder"):
        serve_run(str(tmp_path / "absent"))
    RunFolder.create(str(tmp_path / "run"), {})
    with pytest.raises(InputError, match="no published index yet"):
        serve_run(str(tmp_path / "run"))


def test_refusals_need_neither_ray_nor_torch(tmp_path):
    code = (
        "import sys\n"
        "from ckn_scale.errors import InputError\n"
        "from ckn_scale.serving.app import serve_run\n"
        "try:\n    serve_run(sys.argv[1])\n"
        "except InputError as error:\n    print(error)\n"
        "print(sorted({'ray', 'torch'} & set(sys.modules)))\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "absent")]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert "is not a run folder" in lines[0]
    assert lines[1:] == ["[]"]


def test_driver_ingress_and_groups_load_without_torch():
    """Torch is two thirds of a process's start: the encoder has it, and who opens an index of signs."""
    code = "import sys, ckn_scale.serving.deployments, ckn_scale.serving.local\nprint('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_kk": 3}, "max_kk: Extra inputs are not permitted, got 3"),
        ({"shard_timeout_s": 0}, "shard_timeout_s: Input should be greater than 0, got 0"),
        ({"shard_groups": 0}, "shard_groups: Input should be greater than or equal to 1, got 0"),
    ],
)
def test_bad_settings_are_refused_with_their_value(run_url, settings, message):
    with pytest.raises(SettingsError, match=message):
        serve_run(run_url, port=0, **settings)


@pytest.mark.parametrize(
    ("host", "keys", "insecure", "needs_key", "makes_one"),
    [
        ("127.0.0.1", [], False, False, False),
        ("127.0.0.1", ["mine"], False, True, False),
        ("0.0.0.0", [], False, True, True),
        ("0.0.0.0", ["mine", " "], False, True, False),
        ("0.0.0.0", [" "], False, True, True),
        ("0.0.0.0", [], True, False, False),
    ],
)
def test_addresses_beyond_this_machine_need_a_key(host, keys, insecure, needs_key, makes_one):
    settings, made = resolve_access(host, keys, {"run_url": "run"}, insecure=insecure)
    assert settings.require_keys is needs_key
    assert (made is not None) is makes_one
    expected = [made] if makes_one else [key for key in keys if key.strip()]
    assert [key.sha256 for key in settings.keys] == [hash_key(key) for key in expected]
    assert settings.open_metrics is (is_loopback(host) and not keys)
    assert "mine" not in settings.model_dump_json()
    assert bool(settings.allowed_hosts) is is_loopback(host)


def test_build_app_wants_keys_unless_told_otherwise(run_url, monkeypatch):
    monkeypatch.delenv("CKN_SCALE_API_KEYS", raising=False)
    with pytest.raises(InputError, match=r"serving needs keys: set \$CKN_SCALE_API_KEYS"):
        build_app({"run_url": run_url})
    monkeypatch.setenv("CKN_SCALE_API_KEYS", "mine scope=metrics")
    with pytest.raises(InputError, match="serving needs keys"):
        build_app({"run_url": run_url})
    with pytest.raises(SettingsError, match="run_urll"):
        build_app({"run_urll": run_url})


def test_is_loopback_knows_addresses_and_names():
    assert all(map(is_loopback, ("127.0.0.1", "127.8.0.1", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org")))
