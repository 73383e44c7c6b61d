"""Imports point one way only, as ARCHITECTURE.md draws them; each room is also imported by itself."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ckn_scale

PACKAGE = Path(ckn_scale.__file__).parent
ARCHITECTURE = (PACKAGE / "ARCHITECTURE.md").read_text()
TOP = {"__init__", "api", "cli", "demo"}  # may import everything
GROUND = {"errors", "config", "schemas", "failpoints", "interrupts", "processes", "ray_cluster"}
HEAVY = {"ray", "torch"}
FORBIDDEN = {
    "core": {"ray", "fsspec", "pyarrow", "pydantic", "ckn_scale.storage", "ckn_scale.config"},
    "storage": {"ray", "torch", "ckn_scale.core.encoder", "ckn_scale.steps", "ckn_scale.search"},
    "steps": {"ray", "ckn_scale.runners", "ckn_scale.pipeline", "ckn_scale.serving", "ckn_scale.cli"},
    "search": {"ray", "ckn_scale.steps", "ckn_scale.runners", "ckn_scale.serving"},
    "evaluate": {"ray", "ckn_scale.runners", "ckn_scale.serving"},
    "runners": {"ckn_scale.steps", "ckn_scale.serving", "ckn_scale.cli"},
    "client": {"ray", "torch", "ckn_scale.serving"},
    "runs": {"ray", "ckn_scale.serving", "ckn_scale.cli"},
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


def _room_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _rooms_imported(file: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "ckn_scale":
            rooms |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ckn_scale."):
            rooms.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            rooms |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("ckn_scale.")}
    return rooms - {"__version__"}


def test_arrows_of_the_architecture_are_those_of_the_imports():
    section = ARCHITECTURE.split("## Rooms; imports point one way")[1].split("\n## ")[0]
    lines = re.findall(r"^ {4}(\w+) {2,}(.+)$", section, re.MULTILINE)
    drawn = {room: set() if arrows == "—" else set(arrows.split()) for room, arrows in lines}
    found: dict[str, set[str]] = {}
    for file in PACKAGE.rglob("*.py"):
        room = _room_of(file)
        if room not in TOP | GROUND:
            found[room] = found.get(room, set()) | (_rooms_imported(file) - GROUND - {room})
    assert found == drawn


def test_the_ground_floor_imports_nothing_above_it():
    for file in (PACKAGE / f"{name}.py" for name in GROUND):
        assert _rooms_imported(file) <= GROUND | ({"core"} if file.stem == "config" else set()), file


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
