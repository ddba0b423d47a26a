"""Write docs/flags.md, the page of all flags, from the fields that declare them.

python docs/make_flags.py            # writes the page
python docs/make_flags.py --check    # exits 1 where the page is not up to date
"""

import dataclasses
import sys
import types
import typing
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from accbench.comparing.plan import CompareFlags
from accbench.config.plugins import KINDS, classes
from accbench.config.task import GROUPS, TaskConfig
from accbench.preflight.command import PreflightFlags

PAGE = Path(__file__).with_name("flags.md")
# Larger limits only keep numbers finite.
_NO_LIMIT = 1e6
# What a person types in place of a value.
_PLACEHOLDERS = {int: "N", float: "X", str: "TEXT", Path: "PATH"}
_HEAD_OF_THREE = "| flag | meaning | default |\n| --- | --- | --- |"

HEAD = """\
# Flags

`python docs/make_flags.py` writes this page from the fields that declare the flags. A test
keeps it up to date.

`accbench run`, `launch_single_task.py` and `main.py` take the flags of a run.
`accbench compare` and `accbench preflight` take them too, and more of their own.

- `-` and `_` are the same in every flag.
- `--config FILE.yaml` sets any of them by name. A flag on the command line wins.
- An option of one engine, launcher or data source carries its name: `--xla.replay=on`. In YAML
  that is `xla: {replay: on}`, and behind `--engines` it is `xla:replay=on`.
- "In scripts" tells whether a flag has a meaning with `--script` and in `accbench.accelerate`.
  A script decides everything else itself, and accbench refuses the other flags there.
"""
OPTIONS = """\
## Options of one plug-in

These pages tell more: [engine xla](cuda.md), [engine jax](jax.md), [data sources](data.md),
[Slurm](clusters.md#slurm), [Dask](dask.md).
"""


def page() -> str:
    """Return the page's text."""
    parts = [HEAD]
    parts += [_group(title, group) for title, group in GROUPS.items()]
    parts.append(OPTIONS)
    for kind in KINDS:
        for name, plugin in classes(kind).items():
            options = getattr(plugin, "Options", None)
            if options is not None and plugin.__module__.startswith("accbench."):
                parts += _options(kind, name, options)
    parts += [
        _command("accbench compare", CompareFlags),
        _command("accbench preflight", PreflightFlags),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _group(title: str, group: type) -> str:
    rows = [_row(group, field) + _scripts(field) for field in dataclasses.fields(group)]
    head = "| flag | meaning | default | in scripts |\n| --- | --- | --- | --- |"
    return f"## {title.capitalize()}\n\n{_about(group)}\n\n" + "\n".join([head, *rows])


def _command(title: str, flags_class: type) -> str:
    """Return the section of a command: its own flags first, then those that it changes."""
    of_runs = TaskConfig.__dataclass_fields__
    fields = [f for f in dataclasses.fields(flags_class) if of_runs.get(f.name) is not f]
    fields.sort(key=lambda field: field.name in of_runs)
    rows = [_row(flags_class, field) for field in fields]
    return f"## `{title}`\n\n{_about(flags_class)}\n\n" + "\n".join([_HEAD_OF_THREE, *rows])


def _options(kind: str, name: str, options: type) -> list[str]:
    fields = dataclasses.fields(options)
    if not fields:
        return []
    rows = [_row(options, field, f"{name}.") for field in fields]
    title = f"### {KINDS[kind].title.capitalize()} `{name}`"
    return [f"{title}\n\n" + "\n".join([_HEAD_OF_THREE, *rows])]


def _about(flags_class: type) -> str:
    return " ".join((flags_class.__doc__ or "").split())


def _row(owner: type, field: "dataclasses.Field[Any]", prefix: str = "") -> str:
    hint = typing.get_type_hints(owner)[field.name]
    spelling = f"`--{prefix}{field.name}{_value(hint)}`"
    if hint is bool and field.default is True:
        spelling += f", `--{prefix}no-{field.name}`"
    cells = [spelling, _meaning(field), _default(field)]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _scripts(field: "dataclasses.Field[Any]") -> str:
    return " yes |" if field.metadata.get("of_scripts", True) else " |"


def _value(hint: Any) -> str:
    """Return what follows the flag: its choices, or a placeholder; nothing for a switch."""
    if hint is bool:
        return ""
    if get_origin(hint) is Literal:
        return " " + "|".join(map(str, get_args(hint)))
    if get_origin(hint) in (Union, types.UnionType):
        return _value(next(kind for kind in get_args(hint) if kind is not type(None)))
    if get_origin(hint) is tuple:
        return "".join(map(_value, get_args(hint)))
    return f" {_PLACEHOLDERS[hint]}"


def _meaning(field: "dataclasses.Field[Any]") -> str:
    text = " ".join(field.metadata["help"].split())
    low, high = field.metadata.get("minimum"), field.metadata.get("maximum")
    if high is not None and high >= _NO_LIMIT:
        high = None
    limits = [f"at least {low:g}"] if low is not None else []
    limits += [f"at most {high:g}"] if high is not None else []
    return f"{text} ({', '.join(limits).capitalize()}.)" if limits else text


def _default(field: "dataclasses.Field[Any]") -> str:
    default = field.default
    if default is None or default == "":
        return ""
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def main() -> int:
    """Write the page, or check it with `--check`; return the exit status."""
    text = page()
    if "--check" in sys.argv[1:]:
        return int(PAGE.read_text() != text)
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
