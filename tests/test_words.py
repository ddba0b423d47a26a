"""Docstrings begin with a sentence: a verb first."""

import ast
import pkgutil

import pytest

from benchmarks import structure
from tests.conftest import ROOT

ROOMS = [module.name for module in pkgutil.iter_modules([str(ROOT / "accbench")])]


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    return structure.modules(ROOT / "accbench")


@pytest.mark.parametrize("room", ROOMS)
def test_first_words_are_verbs(room, trees):
    """Properties are noun phrases by right."""
    of_room = {name: tree for name, tree in trees.items() if name.split(".")[0] == room}
    assert of_room
    words = [*structure.first_words(of_room)]
    fragments = [word for word in words if structure.is_fragment(word)]
    assert len(fragments) <= 0.01 * len(words), fragments


def test_two_classes_do_not_share_a_name(trees):
    # A kind of plug-in has one name in each of its files, and so have its options.
    shared = {"Engine", "Source", "Launcher", "Family", "Optimizer", "Options"}
    places: dict[str, list[str]] = {}
    for name, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name not in shared:
                places.setdefault(node.name, []).append(name)
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}
