"""Count what makes a house easy or hard to live in: rooms, arrows, contracts, docstrings.

    python benchmarks/structure.py [ROOT] [--tiny]

A room is a package or a module at the root of accbench; an arrow is a room that imports another,
in functions too; rooms in a circle import each other, directly or through others. A docstring is a
fragment where its first word is no verb: one that ends a noun phrase, an article or a preposition.
Properties are noun phrases by right, and not counted.
"""

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path

# The contracts of an engine, by their modules.
CONTRACTS = {
    "engines": "Engine",
    "engines.requirements": "EngineRequirements",
    "engines.state": "StatefulEngine",
}
LONG_MODULE = 400
# First words that a sentence in the imperative does not have.
NO_VERBS = frozenset({
    "A", "All", "An", "And", "Any", "As", "At", "Before", "Behind", "Beside", "Between",
    "Both", "By", "Each", "Every", "For", "From", "How", "If", "In", "Its", "Like",
    "Likewise", "Many", "More", "Most", "Names", "No", "None", "Not", "Number",
    "Numbers", "Of", "On", "One", "Only", "Or", "Other", "Others", "Part", "Parts", "Some",
    "Such", "That", "The", "Their", "These", "They", "This", "Those", "Through", "To",
    "What", "When", "Where", "Whether", "Which", "Who", "Whose", "With",
})  # fmt: skip


def modules(package: Path) -> dict[str, ast.Module]:
    """Return the syntax trees of a package, by dotted name without the package's own."""
    trees = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        trees[name] = ast.parse(path.read_text())
    return trees


def imported(tree: ast.Module, names: set[str]) -> Iterator[str]:
    """Yield the modules among `names` that a module of accbench imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "accbench":
            base = (node.module or "").partition(".")[2]
            for alias in node.names:
                whole = f"{base}.{alias.name}".strip(".")
                yield whole if whole in names else base


def arrows(trees: dict[str, ast.Module]) -> set[tuple[str, str]]:
    """Return pairs of rooms of which the first imports the second; the package's face is none."""
    pairs = {
        (name.split(".")[0], needed.split(".")[0])
        for name, tree in trees.items()
        for needed in imported(tree, set(trees))
    }
    return {(a, b) for a, b in pairs if a and b and a != b}


def in_circles(pairs: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return the arrows whose second room leads back to the first."""
    reached = {room: {b for a, b in pairs if a == room} for pair in pairs for room in pair}
    for _ in reached:
        for room, others in reached.items():
            reached[room] = others.union(*(reached[other] for other in others))
    return {(a, b) for a, b in pairs if a in reached[b]}


def first_words(trees: dict[str, ast.Module]) -> Iterator[str]:
    """Yield the first word of each function's docstring, without properties'."""
    for tree in trees.values():
        for node in ast.walk(tree):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            is_property = any("property" in ast.unparse(d) for d in node.decorator_list)
            text = ast.get_docstring(node)
            if text and not is_property:
                yield text.split()[0]


def is_fragment(word: str) -> bool:
    """Return whether a docstring that begins with this word is no sentence with a verb first."""
    return word in NO_VERBS or not re.fullmatch(r"[A-Z][a-z]+(-[a-z]+)?[,;]?", word)


def num_methods(tree: ast.Module, class_name: str) -> tuple[int, int]:
    """Return how many methods a class has, and how many of them are abstract."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            methods = [n for n in node.body if isinstance(n, ast.FunctionDef)]
            abstract = [m for m in methods if "abstractmethod" in map(_leaf, m.decorator_list)]
            return len(methods), len(abstract)
    return 0, 0


def _leaf(decorator: ast.expr) -> str:
    return ast.unparse(decorator).rpartition(".")[2]


def main() -> None:
    """Print a table of the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "root", nargs="?", type=Path, default=Path(__file__).resolve().parent.parent
    )
    parser.add_argument("--tiny", action="store_true", help="the same; it takes a second")
    root = parser.parse_args().root
    trees = modules(root / "accbench")
    pairs, words = arrows(trees), [*first_words(trees)]
    fragments = sum(map(is_fragment, words))
    contracts = {
        name: num_methods(trees[module], name)
        for module, name in CONTRACTS.items()
        if module in trees
    }
    at_root = [name for name in trees if name and "." not in name and _is_module(root, name)]
    rows = {
        "rooms of accbench": len({name.split(".")[0] for name in trees if name}),
        "arrows between them": len(pairs),
        "arrows in circles": len(in_circles(pairs)),
        "modules at the root": len(at_root),
        **{
            f"methods of {name}": f"{methods}, {abstract} abstract"
            for name, (methods, abstract) in contracts.items()
        },
        "docstrings of functions that are fragments": f"{fragments} of {len(words)}, "
        f"{fragments / len(words):.1%}",
        f"modules of more than {LONG_MODULE} lines": sum(
            len(path.read_text().splitlines()) > LONG_MODULE
            for path in (root / "accbench").rglob("*.py")
        ),
        "lines of README": len((root / "README.md").read_text().splitlines()),
    }
    print("| | |\n| --- | ---: |")
    for name, value in rows.items():
        print(f"| {name} | {value} |")


def _is_module(root: Path, name: str) -> bool:
    return (root / "accbench" / f"{name}.py").is_file()


if __name__ == "__main__":
    main()
