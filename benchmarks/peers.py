"""accbench beside its peers: the same training by a bare loop and by five libraries.

    python benchmarks/peers.py --set_up                 # makes .peers/, once
    python benchmarks/peers.py FOLDER                   # at most 25 minutes
    python benchmarks/peers.py FOLDER --only '*/compiled/*' --minutes 90
    python benchmarks/peers.py FOLDER --write docs/results/DATE-peers.md

ResNet-18 and ViT-Ti (timm's) and a small GPT-2 (transformers'), in float32 on a CPU, with the same
samples, the same AdamW and equally many threads, by

- bare: the loop of PyTorch's tutorials, with DistributedDataParallel;
- accelerate, fabric: that loop with Hugging Face Accelerate and with Lightning Fabric;
- timm: timm's own train.py, image models alone;
- trainer: transformers' Trainer;
- accbench: its launcher and its own loop, `accbench run`, which draws its batches in advance;
- accbench_accelerate: the bare loop with `accbench.accelerate`.

Each is a process of its own. A round runs all of them once. Those of one setting are alive at once
and train windows of a few steps in turn, in drawn order forwards and backwards; a round's ratio is
the interquartile mean of the ratios of windows next to each other. A setting whose processes are
done is not run again, so that the same command goes on. Rows are named MODEL/MODE/WORKERS/PEER.
"""

import argparse
import fnmatch
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
import urllib.request
from datetime import datetime, timezone
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from accbench.recording import provenance
from accbench.report.statistics import interquartile_mean_ratio, mean_with_interval
from benchmarks import peers_lines
from benchmarks.peers_processes import SCRIPTS, Row, measure
from benchmarks.smoke import add_tiny

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".peers"
TIMM_TRAIN = ENVIRONMENT / "timm_train.py"
# train.py is in no package; this is the one of the pinned version.
TIMM_URL = "https://raw.githubusercontent.com/huggingface/pytorch-image-models/v1.0.28/train.py"
TIMM_SHA256 = "1fb02d26fe16536bc7de2c987980644353117c2b2b8046532261464093cd1ac6"

MODELS = ("resnet18", "vit_ti", "gpt2_tiny")
PEERS = {
    "bare": "a bare loop",
    "accelerate": "Accelerate",
    "fabric": "Lightning Fabric",
    "timm": "timm's train.py",
    "trainer": "transformers' Trainer",
    "accbench": "accbench run",
    "accbench_accelerate": "accbench.accelerate",
}
INSTALLED_FOR_TESTS = ("bare", "accbench", "accbench_accelerate")
# What fits 25 minutes; compiled rows start slowly.
DEFAULT_ROWS = ("*/eager/*", "resnet18/compiled/1/*")


def all_rows() -> list[Row]:
    """Return every row there is."""
    return [
        Row(model, mode, workers, peer)
        for mode in ("eager", "compiled")
        for workers in (1, 2)
        for model in MODELS
        for peer in PEERS
        if not (peer == "timm" and model == "gpt2_tiny")
    ]


def wanted_rows(patterns: list[str], peers: tuple[str, ...]) -> list[Row]:
    """Return the rows that match a pattern, each setting with its bare loop."""
    rows = [row for row in all_rows() if row.peer in peers]
    chosen = {row for row in rows if any(fnmatch.fnmatch(str(row), p) for p in patterns)}
    if not chosen:
        raise SystemExit(f"--only matches no row; they are named like {rows[0]}")
    settings = {row.setting for row in chosen}
    return [
        row for row in rows if row in chosen or (row.peer == "bare" and row.setting in settings)
    ]


def in_drawn_order(rows: list[Row], number: int) -> list[list[Row]]:
    """Return a round's rows: setting by setting, the peers of each in an order of the round."""
    settings = dict.fromkeys(row.setting for row in rows)
    of_settings = [[row for row in rows if row.setting == setting] for setting in settings]
    for setting, of_setting in zip(settings, of_settings, strict=True):
        random.Random(f"{setting} {number}").shuffle(of_setting)
    return of_settings


def read(folder: Path) -> list[dict]:
    """Return what was measured so far."""
    path = folder / "peers.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run_rounds(rows: list[Row], flags: argparse.Namespace) -> None:
    """Measure round by round; none begins that is likely to end behind `--minutes`."""
    began, longest_s = time.monotonic(), 0.0
    for number in range(1, flags.rounds + 1):
        round_began = time.monotonic()
        if round_began - began + longest_s > 60 * flags.minutes:
            print(f"{number - 1} of {flags.rounds} rounds: --minutes {flags.minutes} are over")
            return
        done = {(line["row"], line["round"]) for line in read(flags.folder) if "error" not in line}
        for of_setting in in_drawn_order(rows, number):
            if all((str(row), number) in done for row in of_setting):
                continue
            for row, found in zip(of_setting, measure(of_setting, number, flags), strict=True):
                with (flags.folder / "peers.jsonl").open("a") as file:
                    file.write(json.dumps(found) + "\n")
                told = found.get("error") or f"{found['samples_per_s']:.1f} samples/s"
                print(f"round {number}/{flags.rounds}  {row}: {told}", file=sys.stderr, flush=True)
        longest_s = max(longest_s, time.monotonic() - round_began)


def tables(lines: list[dict], rows: list[Row]) -> str:
    """Return a Markdown table a setting, and the rows of accbench that are behind."""
    good = {(line["row"], line["round"]): line for line in lines if "error" not in line}
    errors = {line["row"]: line["error"] for line in lines if "error" in line}
    parts, behind = [], []
    for setting in dict.fromkeys(row.setting for row in rows):
        of_setting = [row for row in rows if row.setting == setting]
        bare = next(row for row in of_setting if row.peer == "bare")
        model, mode, workers = setting.split("/")
        parts.append(f"### {model}, {mode}, {workers} worker{'s' if workers != '1' else ''}\n")
        parts.append("| trained by | rounds | samples/s | beside the bare loop (95 %) | "
                     "first step s, first round | later | peak MiB |\n"
                     "| --- | ---: | ---: | ---: | ---: | ---: | ---: |")  # fmt: skip
        for row in of_setting:
            found = {number: good[name, number] for name, number in good if name == str(row)}
            if not found:
                why = errors.get(str(row), "not measured")
                parts.append(f"| {PEERS[row.peer]} | 0 | {_escaped(why)} | | | | |")
                continue
            ratio, ratio_text = _beside(found, good, bare)
            parts.append(_line(row, found, ratio_text))
            if row.peer.startswith("accbench") and ratio is not None and ratio < 0.99:
                behind.append(f"- {row}: {ratio_text}")
        parts.append("")
    heading = "accbench below 0.99 of the bare loop:"
    return "\n".join([*parts, *([heading, "", *behind, ""] if behind else [])])


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def _beside(found: dict, good: dict, bare: Row) -> tuple[float | None, str]:
    ratios = [
        interquartile_mean_ratio(
            bare_s / own_s
            for own_s, bare_s in zip(
                line["windows_s"], good[str(bare), number]["windows_s"], strict=True
            )
        )
        for number, line in found.items()
        if (str(bare), number) in good
    ]
    if not ratios:
        return None, "-"
    ratio, (low, high) = mean_with_interval(ratios)
    if all(value == 1 for value in ratios):
        return ratio, "1"
    interval = f" ({low:.2f} to {high:.2f})" if len(ratios) > 1 else " (one round)"
    return ratio, f"{ratio:.2f}{interval}"


def _line(row: Row, found: dict, ratio: str) -> str:
    speeds = sorted(line["samples_per_s"] for line in found.values())
    later = sorted(line["first_step_s"] for number, line in found.items() if number > 1)
    peak = max(line["peak_bytes"] for line in found.values())
    cells = [
        PEERS[row.peer],
        len(found),
        f"{speeds[len(speeds) // 2]:,.1f}",
        ratio,
        f"{found[1]['first_step_s']:.1f}" if 1 in found else "-",
        f"{later[len(later) // 2]:.1f}" if later else "-",
        f"{peak / 2**20:,.0f}",
    ]
    return f"| {' | '.join(map(str, cells))} |"


def result(flags: argparse.Namespace, text: str) -> str:
    """Return a file of docs/results."""
    today = datetime.now(timezone.utc).date()
    return (
        "# accbench beside its peers\n\n"
        f"- **Recorded:** {today}, commit {provenance.commit() or 'unknown'}.\n"
        f"- **Command:** `python benchmarks/peers.py FOLDER`.\n"
        f"- **Machine:** {len(os.sched_getaffinity(0))} cores of {provenance.cpu_name()}; "
        f"versions as benchmarks/peers/requirements.txt pins them.\n\n"
        "Processes train windows in turn. A round's ratio is the interquartile mean of those of "
        "windows next to each other; the geometric mean of the rounds' has Student's t interval. "
        "Seconds to the first step count from the command.\n\n" + text
    )


def set_up(flags: argparse.Namespace) -> None:
    """Make .peers/: an environment with pinned versions, and timm's train.py."""
    uv = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    make = [uv, "venv", "--quiet"] if uv else [sys.executable, "-m", "venv"]
    python = str(ENVIRONMENT / "bin" / "python")
    install = [uv, "pip", "install", "--quiet", "--python", python] if uv else \
        [python, "-m", "pip", "install", "--quiet"]  # fmt: skip
    steps = [[*install, "-r", str(SCRIPTS / "requirements.txt")]]
    if not Path(python).exists():
        version = [f"--python={sys.executable}"] if uv else []
        steps.insert(0, [*make, *version, str(ENVIRONMENT)])
    for step in steps:
        done = subprocess.run(list(map(str, step)), stderr=subprocess.PIPE, text=True)
        if done.returncode:
            why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise SystemExit(f"cannot set up {ENVIRONMENT} ({step[0]}): {why}")
    try:
        text = flags.timm_train.read_bytes() if flags.timm_train else _download(TIMM_URL)
    except OSError as error:
        raise SystemExit(
            f"cannot read timm's train.py ({error}); get {TIMM_URL} and pass --timm_train FILE"
        ) from None
    if hashlib.sha256(text).hexdigest() != TIMM_SHA256:
        raise SystemExit(f"timm's train.py is not that of {TIMM_URL}, for which this was written")
    TIMM_TRAIN.write_bytes(text)
    print(f"{ENVIRONMENT} is ready")


def _download(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=60) as response:
        data: bytes = response.read()
        return data


def parse_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", help="where measurements are kept")
    parser.add_argument("--set_up", action="store_true", help="make .peers/ and end")
    parser.add_argument(
        "--lines",
        action="store_true",
        help="print the lines changed, and write the scripts to FOLDER",
    )
    parser.add_argument("--only", nargs="+", metavar="PATTERN", help="rows, such as 'vit_ti/*'")
    parser.add_argument("--rounds", type=int, default=4, help="at most")
    parser.add_argument("--minutes", type=float, default=25.0, help="no round starts later")
    parser.add_argument("--steps", type=int, help="steps of a process, a quarter of them warm-up")
    parser.add_argument("--write", type=Path, help="also write the tables there")
    parser.add_argument("--python", type=Path, help="another environment than .peers/")
    parser.add_argument("--timm_train", type=Path, help="a file with timm's train.py")
    add_tiny(parser)
    flags = parser.parse_args()
    if not (flags.set_up or flags.lines or flags.folder):
        parser.error("name a folder, or --set_up")
    return flags


def main() -> None:
    flags = parse_flags()
    if flags.set_up:
        set_up(flags)
        return
    lines = peers_lines.table()
    if flags.lines:
        print(lines)
        if flags.folder:
            peers_lines.write_scripts(flags.folder)
        return
    peers = INSTALLED_FOR_TESTS if flags.tiny and flags.python is None else tuple(PEERS)
    default_python = Path(sys.executable) if flags.tiny else ENVIRONMENT / "bin" / "python"
    flags.python = flags.python or default_python
    flags.timm_train = (flags.timm_train or TIMM_TRAIN).absolute()
    for needed in (flags.python, *([flags.timm_train] if "timm" in peers else [])):
        if not needed.exists():
            raise SystemExit(f"there is no {needed}: python benchmarks/peers.py --set_up")
    flags.folder = flags.folder.absolute()
    flags.folder.mkdir(parents=True, exist_ok=True)
    if flags.tiny:
        flags.rounds = 1
    tiny_rows = ["gpt2_tiny/eager/1/*"] if flags.python == default_python else ["*"]
    patterns = flags.only or (tiny_rows if flags.tiny else [*DEFAULT_ROWS])
    rows = wanted_rows(patterns, peers)
    run_rounds(rows, flags)
    text = f"{tables(read(flags.folder), rows)}\n{lines}\n"
    print(text)
    if flags.write:
        flags.write.write_text(result(flags, text))


if __name__ == "__main__":
    main()
