"""XLA's programs as text (HLO), as `--xla_dump_hlo_as_text` writes them, read.

One instruction a line, `%name = type opcode(%operand, ...), attribute=..., ...`, in computations
`%name (parameters) -> type { ... }`; the last before a schedule is in the order of execution.
The grammar is that of xla/hlo/parser/hlo_parser.cc.
"""

import dataclasses
import re
from collections.abc import Iterator
from functools import cached_property

from accbench.errors import RequestError

# Bytes of an element.
_ELEMENT_BYTES = {
    "pred": 1, "s2": 0.25, "u2": 0.25, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2,
    "s32": 4, "u32": 4, "s64": 8, "u64": 8, "f16": 2, "bf16": 2, "f32": 4, "f64": 8, "c64": 8,
    "c128": 16, "f8e5m2": 1, "f8e4m3": 1, "f8e4m3fn": 1, "f8e4m3b11fnuz": 1, "f8e5m2fnuz": 1,
    "f8e4m3fnuz": 1, "f8e3m4": 1, "f8e8m0fnu": 1, "f4e2m1fn": 0.5, "token": 0, "opaque": 0,
}  # fmt: skip
_SHAPE = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,<=]*)\]")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_INDEX_COMMENT = re.compile(r"/\*index=\d+\*/")
_OPCODE = re.compile(r"([\w\-]+)\(")
# torch_xla appends a number to each scope.
_SCOPE_NUMBER = re.compile(r"\.\d+$")


def without_numbers(op_name: str) -> str:
    """An operation's name as torch_xla gives it, without the numbers of its scopes."""
    return "/".join(_SCOPE_NUMBER.sub("", part) for part in op_name.split("/"))


@dataclasses.dataclass(frozen=True)
class Shape:
    """An array: XLA's element type and its dimensions."""

    element_type: str
    dimensions: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Of all dimensions together."""
        number = 1
        for size in self.dimensions:
            number *= size
        return number

    @property
    def num_bytes(self) -> int:
        """Without padding."""
        return int(self.num_elements * _ELEMENT_BYTES[self.element_type])

    def __str__(self) -> str:
        return f"{self.element_type}[{','.join(map(str, self.dimensions))}]"


def shapes(text: str) -> list[Shape]:
    """The arrays in an instruction's type, or in any other text.

    Raises:
        RequestError: one is of an element type that is not known here.
    """
    found = []
    for element_type, sizes in _SHAPE.findall(text):
        if element_type not in _ELEMENT_BYTES:
            raise RequestError(f"XLA's element type {element_type!r} is not known")
        dimensions = tuple(int(size.lstrip("<=")) for size in sizes.split(",") if size)
        found.append(Shape(element_type, dimensions))
    return found


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    """What follows the operands."""
    is_root: bool = False

    @cached_property
    def shapes(self) -> list[Shape]:
        """Of the result, its parts one after the other."""
        return shapes(self.type)

    @property
    def num_bytes(self) -> int:
        """Of the result."""
        return sum(shape.num_bytes for shape in self.shapes)

    def attribute(self, name: str) -> str | None:
        """Of `name=value`: the value, without braces, quotes and the sign of a name."""
        found = re.search(rf'\b{name}=(?:"([^"]*)"|\{{([^}}]*)\}}|%?([^\s,]+))', self.attributes)
        return None if found is None else next(part for part in found.groups() if part is not None)

    @property
    def source(self) -> str:
        """The module of the model and the operation that it came from, as far as was kept."""
        return without_numbers(self.attribute("op_name") or "")


@dataclasses.dataclass(frozen=True)
class Program:
    """A module: computations by name."""

    computations: dict[str, list[Instruction]]
    entry: str

    def called(self, instruction: Instruction, attribute: str) -> list[Instruction]:
        """The computation that an instruction names there; empty if it names none."""
        return self.computations.get(instruction.attribute(attribute) or "", [])


def parse(text: str) -> Program:
    """A program from its text.

    Raises:
        RequestError: it has no entry.
    """
    computations: dict[str, list[Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if not line.startswith(" "):
            begun = _COMPUTATION.match(line)
            if begun:
                current = computations.setdefault(begun[2], [])
                entry = begun[2] if begun[1] else entry
            elif line.startswith("}"):
                current = None
        elif current is not None:
            current.extend(_instruction(line))
    if not entry:
        raise RequestError("the compiler left no program that can be read")
    return Program(computations, entry)


def _instruction(line: str) -> Iterator[Instruction]:
    found = _INSTRUCTION.match(line)
    if found is None:
        return
    rest = _INDEX_COMMENT.sub("", found[3])
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    type_, call = rest[:end], rest[end:].lstrip()
    opcode = _OPCODE.match(call)
    if opcode is None:
        return
    end = _closing(call, opcode.end() - 1)
    operands = re.findall(r"%([\w.\-]+)", call[opcode.end() : end])
    yield Instruction(
        found[2], type_, opcode[1], tuple(operands), call[end + 1 :], found[1] is not None
    )


def _closing(text: str, at: int) -> int:
    """Where the parenthesis that opens at `at` closes."""
    depth = 0
    for index in range(at, len(text)):
        depth += (text[index] == "(") - (text[index] == ")")
        if depth == 0:
            return index
    return len(text)
