"""Parse command lines and YAML files into a `TaskConfig`; flags override the file."""

import contextlib
import dataclasses
import io
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import tyro

from accbench.config import flag_values, plugins, typed_values
from accbench.config.field import check_ranges, expand_home, expand_homes
from accbench.config.task import GROUPS, SCRIPTS_OWN, TaskConfig, data_name
from accbench.errors import RequestError


def parse(argv: Sequence[str], prog: str = "launch_single_task.py") -> TaskConfig:
    """Return the task that command-line arguments ask for, without looking at the machine.

    Raises:
        RequestError: a flag, or a key of the YAML file, is unknown or of a wrong type.
    """
    return task_of(read_flags(argv, prog))


def read_flags(argv: Sequence[str], prog: str, base: type[TaskConfig] = TaskConfig) -> Any:
    """Return the flags of `base`, of every plug-in and of the YAML file, as one object.

    Raises:
        RequestError: a flag, or a key of the YAML file, is unknown or of a wrong type.
    """
    flags_class: Any = flags_class_of(base)  # type: ignore[arg-type]
    flags = _of_a_config_alone(flags_class, argv)
    if flags is not None:
        return flags
    flags = parse_flags(flags_class, argv, prog)
    if flags.config is not None:
        content = flag_values.read(Path(expand_home("--config", flags.config) or ""))
        try:
            if content.get("config") is not None:
                raise RequestError(
                    "config names another file, which is not read; put its lines here"
                )
            from_file = flag_values.as_flags(content, flags_class)
            # The command line's flags have been checked already.
            flags = parse_flags(flags_class, [*from_file, *argv], prog)
        except RequestError as error:
            raise RequestError(f"{flags.config}: {error}") from None
    return flags


def _of_a_config_alone(flags_class: Any, argv: Sequence[str]) -> Any | None:
    """Return the flags of a `config.json` that is all the command line names, as a worker's does.

    None if there is more, or something in it does not fit and needs the parser's words.
    """
    name, _, path = argv[0].partition("=") if len(argv) == 1 else ("", "", "")
    if name != "--config" or not path.endswith(".json"):
        return None
    values = typed_values.read(Path(expand_home("--config", path) or ""))
    flags = typed_values.flags_of(flags_class, values)
    if flags is None or flags.config is not None:
        return None
    return dataclasses.replace(flags, config=path)


def parse_flags(flags_class: Any, argv: Sequence[str], prog: str) -> Any:
    """Return an instance of a dataclass of flags; tyro's boxed messages become one line.

    Raises:
        RequestError: the arguments do not fit `flags_class`.
    """
    message = io.StringIO()
    args = list(argv)
    for index in range(len(args) - 1, 0, -1):  # its value usually begins with a dash, as flags do
        if args[index - 1] in ("--script_args", "--script-args"):
            args[index - 1 : index + 1] = [f"--script_args={args[index]}"]
    try:
        with contextlib.redirect_stderr(message):
            parsed = tyro.cli(
                _for_tyro(flags_class), args=args, prog=prog, use_underscores=True,
                # No flag's help is a comment; searching for it takes longer than all else here.
                config=(tyro.conf.HelptextFromCommentsOff,),
            )  # fmt: skip
    except SystemExit as exit_:
        if not exit_.code:  # --help
            raise
        raise RequestError(_one_line(message.getvalue(), prog)) from None
    return _from_tyro(flags_class, parsed)


def _one_line(boxed: str, prog: str) -> str:
    # tyro draws a frame around its message, with dashes where the terminal has no line-drawing
    # characters; rules inside the frame separate parts, and the first line is a title.
    lines = [line.strip("│|╭╰+ ") for line in boxed.splitlines()]
    parts = re.split(r"[─-]{4,}", "\n".join(line for line in lines if line), maxsplit=2)
    message = " ".join((parts[1] if len(parts) > 1 else boxed).split("Got errors:")[0].split())
    text = message.replace(" .", ".").strip("─╮ ").rstrip(".")
    suggestion = re.search(r"Perhaps you meant:\s+(--[\w.-]+)", "\n".join(lines))
    if suggestion:
        text += f"; perhaps you meant {suggestion[1]}"
    return f"{text}; see {prog} --help"


@cache
def flags_class_of(base: Any) -> type:
    """Return `base` with one more field for every plug-in that has `Options`."""
    options_by_name: list[tuple[str, Any, Any]] = []
    for kind in plugins.KINDS:
        for name, plugin in plugins.classes(kind).items():
            options = getattr(plugin, "Options", None)
            if options is not None and dataclasses.fields(options):
                options_by_name.append((name, options, dataclasses.field(default_factory=options)))
    flags = dataclasses.make_dataclass("Flags", options_by_name, bases=(base,), frozen=True)
    flags.__doc__ = base.__doc__
    return flags


@cache
def _for_tyro(flags_class: Any) -> Any:
    """Build a dataclass of the same flags for tyro: with help, under the titles of `GROUPS`.

    Fields that a subclass of `TaskConfig` adds or redeclares come before the groups.
    """
    fields = {field.name: field for field in dataclasses.fields(flags_class)}
    if not any("help" in field.metadata for field in fields.values()):
        return flags_class  # its help is in the docstrings of its fields
    hints = get_type_hints(flags_class, include_extras=True)
    groups = []
    for title, group in GROUPS.items():
        names = [
            name for name in (field.name for field in dataclasses.fields(group))
            if name in fields and fields[name] is group.__dataclass_fields__[name]  # type: ignore[attr-defined]
        ]  # fmt: skip
        if names:
            group_class = dataclasses.make_dataclass(
                "Group",
                [_field_arguments(hints[name], fields.pop(name)) for name in names],
                frozen=True,
            )
            group_class.__doc__ = group.__doc__
            marked = Annotated[group_class, tyro.conf.arg(name=title), tyro.conf.OmitArgPrefixes]  # type: ignore[valid-type]
            groups.append(
                (title.replace(" ", "_"), marked, dataclasses.field(default_factory=group_class))
            )
    ungrouped = [_field_arguments(hints[field.name], field) for field in fields.values()]
    with_defaults = [member for member in ungrouped if _has_default(member[2])]
    required = [member for member in ungrouped if not _has_default(member[2])]
    flags_for_tyro = dataclasses.make_dataclass(
        "Flags", [*required, *groups, *with_defaults], frozen=True
    )
    flags_for_tyro.__doc__ = flags_class.__doc__
    return flags_for_tyro


def _field_arguments(hint: Any, field: dataclasses.Field[Any]) -> tuple[str, Any, Any]:
    """Return a flag's or an option group's arguments for `dataclasses.make_dataclass`."""
    default: Any = dataclasses.field()
    options: Any = hint
    if dataclasses.is_dataclass(hint):
        hint = _for_tyro(options)
        default = dataclasses.field(default_factory=hint)
    elif field.default_factory is not dataclasses.MISSING:
        default = dataclasses.field(default_factory=field.default_factory)
    elif field.default is not dataclasses.MISSING:
        default = dataclasses.field(default=field.default)
    if "help" in field.metadata:
        hint = Annotated[hint, tyro.conf.arg(help=field.metadata["help"])]
    return field.name, hint, default


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return (field.default, field.default_factory) != (dataclasses.MISSING, dataclasses.MISSING)


def _from_tyro(flags_class: Any, parsed: Any) -> Any:
    """Convert what tyro returned for `_for_tyro(flags_class)` to an instance of `flags_class`."""
    if isinstance(parsed, flags_class):
        return parsed
    values = vars(parsed)
    for title in GROUPS:
        group = values.get(title.replace(" ", "_"))
        values = {**values, **(vars(group) if group is not None else {})}
    hints = get_type_hints(flags_class)
    return flags_class(**{
        field.name: _from_tyro(hints[field.name], values[field.name])
        if dataclasses.is_dataclass(hints[field.name]) else values[field.name]
        for field in dataclasses.fields(flags_class)
    })  # fmt: skip


def task_of_values(values: Mapping[str, Any], prog: str = "launch_single_task.py") -> TaskConfig:
    """Return the task of values as `as_mapping` returns them, or as text.

    Raises:
        RequestError: a value is unknown, of a wrong type or outside of its range.
    """
    flags = typed_values.flags_of(flags_class_of(TaskConfig), values)
    return parse(as_flags(values), prog) if flags is None else task_of(flags)


def as_flags(values: Mapping[str, Any]) -> list[str]:
    """Return a task's values, as `as_mapping` returns them or as text, as flags of a run.

    Raises:
        RequestError: a switch has a value that is neither on nor off.
    """
    return flag_values.as_flags(values, flags_class_of(TaskConfig))


def task_of(flags: Any) -> TaskConfig:
    """Return the task that flags of `read_flags` ask for.

    Raises:
        RequestError: flags contradict each other, or a value is outside of its range.
    """
    engine = flags.engine
    if flags.compiler_opt:
        if engine not in ("xla", TaskConfig.engine):
            raise RequestError(f"--compiler-opt means --engine xla, but --engine is {engine}")
        engine = "xla"
    values = {f.name: getattr(flags, f.name) for f in dataclasses.fields(TaskConfig)}
    used = {engine, flags.launcher, data_name(flags.data)[0], _family(flags.model)}
    options = {
        name: expand_homes(getattr(flags, name), f"{name}.")
        for name in used
        if hasattr(flags, name)
    }
    task = TaskConfig(**{**values, "engine": engine, "compiler_opt": False, "options": options})
    task = expand_homes(task)
    check_ranges(task)
    if task.script is not None:
        _check_script(task)
    for name, group in options.items():
        check_ranges(group, f"{name}.")
    return task


def _family(model: str | None) -> str:
    """Return the name of the family that has a model of this name; empty if none has."""
    families = plugins.classes("models").items()
    return next((name for name, family in families if model in family.names), "")


def _check_script(task: TaskConfig) -> None:
    defaults = {f.name: f.default for f in dataclasses.fields(TaskConfig)}
    for name in SCRIPTS_OWN:
        # 0 also means no checkpoints.
        if getattr(task, name) not in (defaults[name], 0 if name == "save_interval" else None):
            raise RequestError(
                f"--{name} is not for a script, which decides that by itself: leave it out "
                "with --script, or pass it on by --script_args"
            )
