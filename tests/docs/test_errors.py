"""The tree of exceptions that errors.py draws is the real one, and names what other modules derive."""

import ast
import re
from pathlib import Path

from ckn_scale import errors

PACKAGE = Path(errors.__file__).parent
TREE_LINE = re.compile(r"(?P<branch>[│├└─ ]*)(?P<name>[A-Z]\w+) {2,}\S")


def drawn_parents():
    """Parent by child, from the indentation of the drawing: each level is four characters."""
    above, parents = [], {}
    for line in errors.__doc__.splitlines():
        if match := TREE_LINE.match(line):
            depth = len(match["branch"]) // 4
            above[depth:] = [match["name"]]
            parents[match["name"]] = above[depth - 1] if depth else "Exception"
    return parents


def defined_parents(path):
    classes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]
    return {node.name: base.id for node in classes for base in node.bases if isinstance(base, ast.Name)}


def test_the_tree_in_the_docstring_is_the_one_of_the_classes():
    assert drawn_parents() == defined_parents(PACKAGE / "errors.py")


def test_errors_of_other_modules_are_named_with_their_parent():
    ours = drawn_parents().keys()
    found = {
        f"{name}({parent})"
        for path in PACKAGE.rglob("*.py")
        if path.name != "errors.py"
        for name, parent in defined_parents(path).items()
        if parent in ours
    }
    sentence = errors.__doc__.rpartition("\n\n")[2]
    input_errors, others = sentence.partition("are InputErrors")[::2]
    named = {f"{name}(InputError)" for name in re.findall(r"\b[A-Z]\w+", input_errors.partition(":")[2])}
    named |= {f"{name}(CknScaleError)" for name in re.findall(r"(\w+) is a CknScaleError", others)}
    assert found == named
