"""Does the numerics pass find planted errors, and let right engines be?

    python benchmarks/numerics_trials.py FOLDER [--settings NAME;...] [--engines NAME,...]
        [--seeds N] [--right_only] [--judge_only] [--tiny]

For each setting (a network, sizes, a type, one or two workers) and seed: the reference, plain
ddp in both layouts, and then every engine of benchmarks/planted that has a meaning there, and
right ones, each through the pass that `accbench compare` runs. Prints a table of verdicts, as
Markdown, and the reasons. A folder that was begun is gone on with.
"""

import argparse
import collections
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import planted  # noqa: E402
from benchmarks.numerics_passes import judge, start_setting  # noqa: E402
from benchmarks.numerics_settings import SETTINGS  # noqa: E402
from benchmarks.smoke import add_tiny  # noqa: E402

# As a table is read quickly.
_WORDS = {"differs": "found", "trains the same": "same"}
RIGHT = ("ddp:again", "ddp:no-channels_last", "xla", "inductor")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--settings", default=";".join(n for n in SETTINGS if not n.startswith("small"))
    )
    parser.add_argument("--engines")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--right_only", action="store_true")
    parser.add_argument("--judge_only", action="store_true")
    add_tiny(parser)
    flags = parser.parse_args()
    if flags.tiny:
        flags.settings, flags.engines = "small, transformer", "ddp:again,dropout_off"
    base = flags.folder.absolute()
    names = [name.strip() for name in flags.settings.split(";")]
    only = flags.engines.split(",") if flags.engines else None
    wanted = {}
    for name in names:
        faults = () if flags.right_only else SETTINGS[name].faults
        wanted[name] = [e for e in (*RIGHT, *faults) if only is None or e in only]
    if not flags.judge_only:
        with tempfile.TemporaryDirectory() as folder:
            plugins = planted.install(Path(folder))
            for name, engines in wanted.items():
                start_setting(base, name, list(range(flags.seeds)), engines, plugins)
    table(base, names, wanted, flags.seeds)


def table(base: Path, names: list[str], wanted: dict[str, list[str]], num_seeds: int) -> None:
    """Engine x setting -> verdicts."""
    engines = list(dict.fromkeys(engine for name in names for engine in wanted[name]))
    print("| engine | " + " | ".join(names) + " |")
    print("| --- " * (len(names) + 1) + "|")
    reasons = []
    for engine in engines:
        cells = []
        for name in names:
            if engine not in wanted[name]:
                cells.append("")
                continue
            found = [judge(base, name, seed, engine) for seed in range(num_seeds)]
            counts = collections.Counter(_WORDS.get(v.verdict, v.verdict) for v in found)
            cells.append(", ".join(f"{v} {n}" if num_seeds > 1 else v for v, n in counts.items()))
            reasons += [f"{engine}, {name}: {v.reason} (worst {v.worst})" for v in found]
        print(f"| {engine} | " + " | ".join(cells) + " |")
    print()
    print("\n".join(reasons))


if __name__ == "__main__":
    main()
