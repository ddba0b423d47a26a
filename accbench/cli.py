"""The command line: `accbench run | compare | preflight | report | export | data | doctor`."""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from accbench import config
from accbench.config.field import flag
from accbench.errors import RequestError, print_interruption, print_refusal
from accbench.system.other_environment import restart_early
from accbench.system.standard_streams import quiet_when_closed

PROG = "accbench"


@quiet_when_closed
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command `accbench`, and return the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(f"usage: {PROG} COMMAND ...\n")
        for name, command in COMMANDS.items():
            print(f"  {name:<9} {(command.__doc__ or '').splitlines()[0]}")
        return 0
    if argv[0] not in COMMANDS:
        print(f"{PROG}: no command {argv[0]!r}; there are: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    try:
        return COMMANDS[argv[0]](argv[1:])
    except KeyboardInterrupt:  # while torch is imported; behind that each command has its own
        return print_interruption(f"{PROG} {argv[0]}: interrupted")


@quiet_when_closed
def run(argv: Sequence[str], prog: str = f"{PROG} run", worker: Sequence[str] = ()) -> int:
    """Train a model, one worker a device; the same as launch_single_task.py."""
    restart_early(argv)
    from accbench.system.gc_pause import pause_gc

    with pause_gc():
        from accbench.launchers.common.run import run

    return run(argv, prog, worker)


@quiet_when_closed
def compare(argv: Sequence[str], prog: str = f"{PROG} compare") -> int:
    """Measure engines in turn, several times, and say what was shown."""
    restart_early(argv)
    if not {"-h", "--help"} & {*argv}:
        from accbench.comparing.run import start_fork_server

        start_fork_server()  # it imports torch while this process does, and reads the flags
    from accbench.comparing import rounds

    return rounds.main(argv, prog)


@dataclasses.dataclass(frozen=True)
class ReportFlags:
    """Show what runs recorded, each beside the first."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of runs or of comparisons, or records.jsonl files."""
    format: Literal["table", "md", "html", "json"] = flag(
        "table",
        "How to write it; html is one page that needs no network.",
    )
    allow_mixed: bool = flag(
        False,
        "Also of different machines, models, dtypes or global batches; they are marked.",
    )
    fail_if: str | None = flag(
        None,
        "Of comparisons: the conditions of `accbench compare --fail_if`, with its exit status.",
    )


def report(argv: Sequence[str]) -> int:
    """Show what runs recorded, each beside the first."""
    from accbench.report import conditions, publish

    prog = f"{PROG} report"
    try:
        flags = config.parse_flags(ReportFlags, argv, prog)
        if not flags.runs:
            raise RequestError("name at least one run's folder")
        text, problems = publish.report(flags.runs, flags.format, flags.allow_mixed)
    except RequestError as error:
        return print_refusal(prog, error)
    print(text, end="")
    for problem in problems:  # the others are still reported
        print_refusal(prog, RequestError(problem))
    try:
        judged = conditions.judge(flags.runs, flags.fail_if)
    except RequestError as error:
        return 2 if str(error) in problems else print_refusal(prog, error)
    status = max((conditions.exit_status(*each, prog) for each in judged), default=0)
    return 2 if problems else status


@dataclasses.dataclass(frozen=True)
class MockFlags:
    """Make a mock ImageNet: real JPEG files, DIR/train and DIR/val, one folder a class."""

    folder: Annotated[Path, tyro.conf.Positional] = flag(Path("data/mock_imagenet"), "Where to.")
    classes: int = flag(10, "Classes; at least 1.")
    train_images: int = flag(64, "Training images a class; at least 1.")
    val_images: int = flag(16, "Validation images a class; at least 1.")
    seed: int = flag(0, "The same seed gives the same files.")


@dataclasses.dataclass(frozen=True)
class ConvertFlags:
    """Write a folder of class folders as a RecordIO file with its index."""

    folder: Annotated[Path, tyro.conf.Positional]
    """Holds one folder of images a class."""
    out: Annotated[Path, tyro.conf.Positional]
    """The file to write, OUT.rec; OUT.idx and OUT.classes.txt come beside it."""


@dataclasses.dataclass(frozen=True)
class DigitsFlags:
    """Write scikit-learn's 1,797 scanned digits as image folders and as RecordIO files."""

    folder: Annotated[Path, tyro.conf.Positional] = flag(
        Path("data/digits"),
        "Where to: DIR/train and DIR/val, DIR/train.rec and DIR/val.rec.",
    )


def data(argv: Sequence[str]) -> int:
    """Make data: `data mock [DIR]`, `data digits [DIR]`; `data convert FOLDER OUT.rec`."""
    makers: dict[str, Callable[[Sequence[str], str], None]] = {
        "mock": _mock, "digits": _digits, "convert": _convert,
    }  # fmt: skip
    if not argv or argv[0] not in makers:
        problem = f"name what to make; there are: {', '.join(makers)}"
        return print_refusal(f"{PROG} data", RequestError(problem))
    prog = f"{PROG} data {argv[0]}"
    try:
        makers[argv[0]](argv[1:], prog)
    except RequestError as error:
        return print_refusal(prog, error)
    except KeyboardInterrupt:
        effect = "continues from here" if argv[0] == "mock" else "starts over"
        return print_interruption(f"{prog}: interrupted; the same command {effect}")
    return 0


def _mock(argv: Sequence[str], prog: str) -> None:
    from accbench.data import mock_images

    flags = config.parse_flags(MockFlags, argv, prog)
    plan = mock_images.MockImagePlan(
        flags.classes, flags.train_images, flags.val_images, flags.seed
    )
    mock_images.make(flags.folder, plan)


def _digits(argv: Sequence[str], prog: str) -> None:
    from accbench.data import digits

    flags = config.parse_flags(DigitsFlags, argv, prog)
    print(f"{digits.make(flags.folder)} digits in {flags.folder}")


def _convert(argv: Sequence[str], prog: str) -> None:
    from accbench.data import convert

    flags = config.parse_flags(ConvertFlags, argv, prog)
    num_images = convert.convert(flags.folder, flags.out)
    print(f"{num_images} images in {flags.out}")


@dataclasses.dataclass(frozen=True)
class DoctorFlags:
    """Tell what is on this machine and what can train on it."""

    format: Literal["table", "json"] = flag(
        "table",
        "How to write it; json is for a bug report and holds nothing private.",
    )
    self_test: bool = flag(
        False,
        "Also train three steps with every engine and device, alone and with two workers.",
    )


def doctor(argv: Sequence[str]) -> int:
    """Tell what is on this machine and what can train on it; --self-test tries it."""
    from accbench.machine import doctor as examination

    prog = f"{PROG} doctor"
    try:
        flags = config.parse_flags(DoctorFlags, argv, prog)
    except RequestError as error:
        return print_refusal(prog, error)
    facts = examination.examine()
    if flags.self_test:
        from accbench.machine import self_test

        facts["self_test"] = self_test.run()
    print(examination.render(facts, flags.format), end="")
    return int(any(result["error"] is not None for result in facts.get("self_test", [])))


@dataclasses.dataclass(frozen=True)
class ExportFlags:
    """Write the weights of a run's newest checkpoint for other tools."""

    run: Annotated[Path, tyro.conf.Positional]
    """A run's folder, or a checkpoint's."""
    out: Annotated[Path, tyro.conf.Positional]
    """The file to write."""
    format: Literal["state_dict", "safetensors", "onnx", "onnx_int8"] = flag(
        "state_dict",
        "state_dict: what torch.load gives to load_state_dict. safetensors: likewise, no "
        "pickle. onnx: the whole network, from bytes to logits. onnx_int8: quantised, smaller, "
        "less exact.",
    )
    average: bool = flag(True, "The moving average of the weights, where the run kept one.")
    evaluate: bool = flag(
        False,
        "Of onnx and onnx_int8: their top-1 on the run's validation set, beside torch's.",
    )


def export(argv: Sequence[str]) -> int:
    """Write the weights of a run's newest checkpoint for other tools."""
    prog = f"{PROG} export"
    try:
        flags = config.parse_flags(ExportFlags, argv, prog)
        from accbench.training import export as exporting

        line = exporting.export(**vars(flags))
    except RequestError as error:
        return print_refusal(prog, error)
    print(line)
    return 0


def preflight(argv: Sequence[str]) -> int:
    """Compile a step for a GPU that is not here: does it fit, what does it move."""
    restart_early(argv)
    from accbench.preflight import command

    return command.main(argv, f"{PROG} preflight")


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "run": run,
    "compare": compare,
    "preflight": preflight,
    "report": report,
    "export": export,
    "data": data,
    "doctor": doctor,
}
