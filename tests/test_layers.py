"""Modules of accbench import each other in one direction only."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

from tests.conftest import ROOT

PACKAGE = ROOT / "accbench"


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_no_module_is_imported_in_a_circle():
    """Imports inside of functions count as well."""
    modules = {name_of(path): path for path in PACKAGE.rglob("*.py")}
    assert len(modules) > 50
    graph: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    graph[name].add(whole if whole in modules else node.module)
            elif isinstance(node, ast.Import):
                graph[name] |= {alias.name for alias in node.names}
    inside = {name: needs & set(modules) - {name} for name, needs in graph.items()}
    TopologicalSorter(inside).prepare()  # raises on a circle, and names it
