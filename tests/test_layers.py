"""Packages of accbench import each other in one direction, and plug-ins are found unimported."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

from accbench.config import plugins
from tests.conftest import ROOT

PACKAGE = ROOT / "accbench"
# From the ground up: a room imports only rooms before it. Change the order where reading shows a
# better one; an import that goes up is a function in the wrong room.
ROOMS = (
    "errors", "system", "config", "distributed", "recording", "pjrt", "logger", "report", "models",
    "data", "resolving", "engines", "training", "machine", "launchers", "preflight", "comparing",
    "cli", "__main__",
)  # fmt: skip
ROOT_MODULES = {"__main__", "cli", "errors", "resolving"}
# What was public at another path before, and imports from where it is now.
OLD_PATHS = {"logger"}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports() -> dict[str, set[str]]:
    """Module -> modules of accbench that it imports, inside of functions as well."""
    modules = {name_of(path): path for path in PACKAGE.rglob("*.py")}
    graph: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    graph[name].add(whole if whole in modules else node.module)
            elif isinstance(node, ast.Import):
                graph[name] |= {alias.name for alias in node.names}
    return {name: needs & set(modules) - {name} for name, needs in graph.items()}


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def test_no_module_is_imported_in_a_circle():
    graph = imports()
    assert len(graph) > 50
    TopologicalSorter(graph).prepare()  # raises on a circle, and names it


def test_rooms_import_only_rooms_below():
    up = [
        f"{module} imports {needed}"
        for module, needs in imports().items()
        for needed in needs
        # The package itself is the public face: a version, and `accelerate` when it is asked for.
        if room_of(module) and room_of(needed)
        and ROOMS.index(room_of(needed)) > ROOMS.index(room_of(module))
    ]  # fmt: skip
    assert up == []


def test_few_modules_stand_at_the_root():
    assert {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"} == ROOT_MODULES | OLD_PATHS
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert packages | ROOT_MODULES | OLD_PATHS == set(ROOMS)


def test_finding_plug_ins_imports_none_of_them():
    program = (
        "import sys; from accbench.config import plugins; "
        "found = [m for kind in plugins.KINDS for m in plugins.modules(kind).values()]; "
        "print(len(found), *(m for m in found if m in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    number, *imported = done.stdout.split()
    assert int(number) > 20
    assert imported == []


def test_plug_ins_are_those_that_are_documented():
    assert {*plugins.modules("launchers")} >= {"local", "elastic", "slurm", "dask"}
    assert {*plugins.modules("engines")} >= {"ddp", "inductor", "xla", "jax"}


def test_every_module_of_a_folder_of_sources_is_a_plug_in():
    for kind, folder in (("data", PACKAGE / "data/sources"),):
        modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
        assert set(plugins.modules(kind)) == modules
