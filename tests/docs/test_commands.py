"""Commands that the documents give are accepted: verb, options, their values and settings, scripts."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from ckn_scale.cli.main import app
from ckn_scale.config import load_settings
from ckn_scale.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    path
    for path in sorted(ROOT.rglob("*.md"))
    if not {".venv", "demo-out"} & set(path.relative_to(ROOT).parts)
]
README = ROOT / "README.md"


def read_blocks(document: Path) -> str:
    """Its code blocks, fenced or indented, with continued lines joined."""
    text = document.read_text()
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    indented = re.findall(r"^    +(.*)$", text, re.MULTILINE)
    return "\n".join([*fenced, *indented]).replace("\\\n", " ")


def read_spans(document: Path) -> list[str]:
    outside = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", outside)]


def find_commands(document: Path, program: str) -> list[list[str]]:
    """Whole commands, in code blocks; what follows a pipe or a # is left out."""
    lines = [line.strip().split(" | ")[0] for line in read_blocks(document).splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith(f"{program} ")]


def find_mentions(document: Path, program: str) -> list[list[str]]:
    """Commands within a sentence, which may leave arguments out."""
    return [shlex.split(span) for span in read_spans(document) if span.startswith(f"{program} ")]


def find_verb(words: list[str]) -> tuple[typer.core.TyperCommand, list[str]]:
    """The command that `ckn-scale WORDS` calls, and its arguments."""
    command, rest = typer.main.get_command(app), list(words)
    while isinstance(command, TyperGroup) and rest and rest[0][0].isalpha():
        assert rest[0] in command.commands, f"ckn-scale {' '.join(words)}: no verb {rest[0]}"
        command = command.commands[rest.pop(0)]
    return command, rest


def options_of(command: typer.core.TyperCommand) -> set[str]:
    return {"--help", *(name for param in command.params for name in (*param.opts, *param.secondary_opts))}


@cache
def options_of_all() -> set[str]:
    found, left = set(), [typer.main.get_command(app)]
    while left:
        command = left.pop()
        found |= options_of(command)
        left += command.commands.values() if isinstance(command, TyperGroup) else []
    return found


@cache
def options_of_script(script: Path) -> set[str]:
    """Of a job as its --help says; of a benchmark as they stand in the source, which starts no torch."""
    if script.parent.name == "jobs":
        said = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, check=True)
        return set(re.findall(r"--[\w-]+", said.stdout))
    texts = [script.read_text()]
    texts += [other.read_text() for other in script.parent.glob("*.py") if f"from {other.stem} " in texts[0]]
    return {option for text in texts for option in re.findall(r'"(--[\w-]+)"', text)}


def named_options(words: list[str]) -> set[str]:
    return {word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)}


def check_settings(words: list[str]) -> None:
    """Each `--set key.path=value` is one that some preset takes."""
    for name, value in pairwise(words):
        if name == "--set" and value != "key.path=value":
            load_settings("paper", None, [value])


def check_verbs(document: Path) -> None:
    for words in find_commands(document, "ckn-scale"):
        command, arguments = find_verb(words[1:])
        command.make_context(words[1], list(arguments)).close()
        check_settings(words)
    for words in find_mentions(document, "ckn-scale"):
        command, arguments = find_verb(words[1:])
        assert named_options(arguments) <= options_of(command), words
        check_settings(words)


def check_scripts(document: Path) -> None:
    commands = [*find_commands(document, "python"), *find_mentions(document, "python")]
    commands += [words[words.index("--") + 1 :] for words in find_commands(document, "ray job submit")]
    for words in commands:
        script = ROOT / words[1]
        assert script.is_file(), words
        assert named_options(words[2:]) <= options_of_script(script), words


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_of_a_document_are_accepted(document):
    check_verbs(document)
    check_scripts(document)


@pytest.mark.parametrize("document", [README, ROOT / "ckn_scale/GUIDE.md"], ids=lambda path: path.stem)
def test_options_that_a_document_names_exist(document):
    spans = [span for span in read_spans(document) if span.startswith("--")]
    assert len(spans) >= 3
    for span in spans:
        assert named_options(span.split()) <= options_of_all(), span
        check_settings(span.split())
    comments = re.findall(r"#.*", read_blocks(document))
    assert named_options(re.findall(r"--[a-z-]+", " ".join(comments))) <= options_of_all()


def test_commands_are_found():
    """The readers above find what there is to check."""
    assert len(find_commands(README, "ckn-scale")) >= 10
    assert len(find_commands(README, "ray job submit")) == 1
    assert len(find_commands(ROOT / "ckn_scale/evaluate/README.md", "ckn-scale")) >= 4
    assert len(find_mentions(ROOT / "benchmarks/README.md", "python")) >= 5


@pytest.mark.parametrize(
    ("check", "line"),
    [
        (check_verbs, "ckn-scale index photos/ run/ --apend"),
        (check_verbs, "ckn-scale indx photos/ run/"),
        (check_verbs, "ckn-scale evaluate images photos/ --protocol none"),
        (check_verbs, "ckn-scale index photos/"),
        (check_verbs, "ckn-scale index photos/ run/ --set reduction.metod=pca"),
        (check_scripts, "python benchmarks/fit.py --image 5"),
        (check_scripts, "python benchmarks/fitt.py"),
        (check_scripts, "ray job submit -- python jobs/pipeline.py photos run --worker 2"),
    ],
)
def test_a_wrong_command_is_found(check, line, tmp_path):
    document = tmp_path / "wrong.md"
    document.write_text(f"```sh\n{line}\n```\n")
    with pytest.raises((AssertionError, InputError, TyperException)):
        check(document)
