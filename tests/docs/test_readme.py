"""What is written down is there: help, paths, job commands and the tree in the README."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from ckn_scale.cli.main import app
from ckn_scale.config import list_presets

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
JOBS = sorted((ROOT / "jobs").glob("*.py"))
FILE = re.compile(r"`((?:[\w.-]+/)*[\w.-]+\.(?:py|md|toml|yaml|npz|txt))(?:: (\w+))?`")


def _commands(text: str, program: str) -> list[list[str]]:
    joined = text.replace("\\\n", " ")
    lines = [line.strip() for line in joined.splitlines() if line.strip().startswith(program)]
    return [shlex.split(line, comments=True) for line in lines]


def _verbs() -> list[str]:
    return sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("verb", _verbs())
def test_help_of_every_verb_has_an_example(verb):
    result = CliRunner().invoke(app, [verb, "--help"])
    assert result.exit_code == 0
    assert f"ckn-scale {verb} " in result.output or "Commands" in result.output


def test_readme_names_the_presets_there_are():
    assert all(f"`{preset}`" in README for preset in list_presets())


@pytest.mark.parametrize("document", ["README.md", "ckn_scale/GUIDE.md"])
def test_links_of_a_document_exist(document):
    path = ROOT / document
    text = path.read_text()
    titles = [re.sub(r"[^\w -]", "", title).lower() for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert links
    for link in links:
        file, _, section = link.partition("#")
        assert (path.parent / file).exists() if file else section.replace("-", " ") in spaced(titles), link


def spaced(titles: list[str]) -> list[str]:
    return [title.replace("-", " ") for title in titles]


def test_readme_tree_is_the_tree():
    """Each name is where the tree draws it, and `steps/` is drawn whole."""
    tree = README.split("## The path of an image")[1].split("```")[1]
    drawn, parents = [], [ROOT]
    for line in tree.splitlines()[1:]:
        depth = (len(line) - len(line.lstrip())) // 2
        names = re.split(r"\s{3,}", line.strip())[0].split()
        drawn += [parents[depth] / name for name in names]
        parents[depth + 1 :] = [drawn[-1]]
    missing = [path for path in drawn if not path.exists()]
    assert not missing
    package = ROOT / "ckn_scale"
    steps = {path for path in (package / "steps").glob("*.py") if path.name != "__init__.py"}
    assert steps == {path for path in drawn if path.parent == package / "steps"}
    rooms = {path.parent for path in package.glob("*/__init__.py")}
    assert rooms <= set(drawn)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.stem)
def test_job_docstring_is_its_submit_command(job):
    (command,) = _commands(ast.get_docstring(ast.parse(job.read_text())) or "", "ray job submit")
    entry = command[command.index("--") + 1 :]
    assert entry[:2] == ["python", f"jobs/{job.name}"]
    verb = ["images"] if job.stem == "evaluate" else []
    result = subprocess.run([sys.executable, str(job), *verb, "--help"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for option in (part for part in entry if part.startswith("--")):
        assert option in result.stdout, option


def test_make_targets_of_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"make ([\w-]+)", README))
    assert {"demo", "test"} <= targets
    for target in targets:
        assert f"\n{target}:" in makefile


@pytest.mark.parametrize(
    "document", ["CONTRIBUTING.md", "tests/README.md", "ckn_scale/core/PAPER.md", "ckn_scale/ARCHITECTURE.md"]
)
def test_files_and_names_of_a_document_exist(document):
    """A file in backticks is there, and so is the name in `file.py: name`."""
    named = set(FILE.findall((ROOT / document).read_text()))
    assert len(named) >= 10
    for file, name in named:
        places = [ROOT, (ROOT / document).parent, *(ROOT / "ckn_scale").glob("**")]
        found = [place / file for place in places if (place / file).is_file()]
        assert found, f"{document} names {file}"
        assert not name or re.search(rf"\b{name}\b", found[0].read_text()), f"{file} has no {name}"
