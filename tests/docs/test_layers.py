"""Imports point one way only: each layer is imported in a fresh interpreter and looked at."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import ckn_scale

PACKAGE = Path(ckn_scale.__file__).parent
HEAVY = {"ray", "torch"}
FORBIDDEN = {
    "core": {"ray", "fsspec", "pyarrow", "pydantic", "ckn_scale.storage", "ckn_scale.config"},
    "storage": {"ray", "torch", "ckn_scale.core.encoder", "ckn_scale.steps", "ckn_scale.search"},
    "steps": {"ray", "ckn_scale.runners", "ckn_scale.serving", "ckn_scale.cli"},
    "search": {"ray", "ckn_scale.steps", "ckn_scale.runners", "ckn_scale.serving"},
    "evaluate": {"ray", "ckn_scale.runners", "ckn_scale.serving"},
    "runners": {"ckn_scale.serving", "ckn_scale.cli"},
    "serving": {"ckn_scale.steps", "ckn_scale.runners", "ckn_scale.cli"},
}


def _modules_of(layer: str) -> list[str]:
    files = sorted((PACKAGE / layer).rglob("*.py"))
    names = [".".join(("ckn_scale", *file.relative_to(PACKAGE).with_suffix("").parts)) for file in files]
    return [name.removesuffix(".__init__") for name in names]


def _loaded_after(statement: str) -> set[str]:
    code = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(result.stdout.splitlines()[-1]))


@pytest.mark.parametrize("layer", FORBIDDEN)
def test_layer_imports_only_downwards(layer):
    modules = _modules_of(layer)
    assert len(modules) > 1 or layer == "evaluate"
    loaded = _loaded_after("\n".join(f"import {module}" for module in modules))
    assert not loaded & FORBIDDEN[layer]


def test_import_of_the_package_is_light():
    assert not _loaded_after("import ckn_scale") & HEAVY


def test_help_is_light():
    statement = "from ckn_scale.cli.main import app\nfrom typer.testing import CliRunner\n"
    statement += "assert CliRunner().invoke(app, ['index', '--help']).exit_code == 0"
    assert not _loaded_after(statement) & HEAVY


def test_status_is_light():
    """Torch would take as much memory as the records of 100,000 shards, and longer than most answers."""
    assert not _loaded_after("import ckn_scale.runs.status") & HEAVY
