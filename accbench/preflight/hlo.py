"""A parser of XLA's HLO text, as `--xla_dump_hlo_as_text` writes it.

Each line holds one instruction, `%name = type opcode(%operand, ...), attribute=..., ...`, in
computations `%name (parameters) -> type { ... }`; the last before a schedule is in the order of
execution. Newer versions write `%name#1` for an element of a tuple; here it is an instruction
get-tuple-element of that name, as older ones write it.
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
    """Remove the scope numbers that torch_xla appends from an operation's name."""
    return "/".join(_SCOPE_NUMBER.sub("", part) for part in op_name.split("/"))


@dataclasses.dataclass(frozen=True)
class Shape:
    """An array's shape: XLA's element type and dimensions."""

    element_type: str
    dimensions: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Number of elements in the array."""
        number = 1
        for size in self.dimensions:
            number *= size
        return number

    @property
    def num_bytes(self) -> int:
        """Size in bytes without padding."""
        return int(self.num_elements * _ELEMENT_BYTES[self.element_type])

    def __str__(self) -> str:
        return f"{self.element_type}[{','.join(map(str, self.dimensions))}]"


def shapes(text: str) -> list[Shape]:
    """Return the shapes in an instruction's type, or in any other text.

    Raises:
        RequestError: an element type is unknown.
    """
    parsed = []
    for element_type, sizes in _SHAPE.findall(text):
        if element_type not in _ELEMENT_BYTES:
            raise RequestError(f"XLA's element type {element_type!r} is not known")
        dimensions = tuple(int(size.lstrip("<=")) for size in sizes.split(",") if size)
        parsed.append(Shape(element_type, dimensions))
    return parsed


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An instruction of a computation."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    """The text after the operands."""
    is_root: bool = False

    @cached_property
    def shapes(self) -> list[Shape]:
        """Shapes of the result; a tuple's elements one after the other."""
        return shapes(self.type)

    @property
    def num_bytes(self) -> int:
        """Size of the result in bytes."""
        return sum(shape.num_bytes for shape in self.shapes)

    def attribute(self, name: str) -> str | None:
        """Return the value of `name=value` without braces, quotes and a leading %, or None."""
        match = re.search(rf'\b{name}=(?:"([^"]*)"|\{{([^}}]*)\}}|%?([^\s,]+))', self.attributes)
        return None if match is None else next(text for text in match.groups() if text is not None)

    @property
    def source(self) -> str:
        """The model's module and the operation that it comes from, as far as XLA kept them."""
        return without_numbers(self.attribute("op_name") or "")


@dataclasses.dataclass(frozen=True)
class Program:
    """An HLO module: its computations by name."""

    computations: dict[str, list[Instruction]]
    entry: str

    def called(self, instruction: Instruction, attribute: str) -> list[Instruction]:
        """Return the computation that an instruction's attribute names; empty if it names none."""
        return self.computations.get(instruction.attribute(attribute) or "", [])


def parse(text: str) -> Program:
    """Parse a program's text.

    Raises:
        RequestError: it has no entry computation.
    """
    computations: dict[str, list[Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if not line.startswith(" "):
            header = _COMPUTATION.match(line)
            if header:
                current = computations.setdefault(header[2], [])
                entry = header[2] if header[1] else entry
            elif line.startswith("}"):
                current = None
        elif current is not None:
            current.extend(_instruction(line))
    if not entry:
        raise RequestError(
            "the program that the compiler dumped cannot be read: it has no entry computation"
        )
    return Program({name: [*_with_elements(of)] for name, of in computations.items()}, entry)


def _with_elements(instructions: list[Instruction]) -> Iterator[Instruction]:
    """Yield instructions, and before its first use each element `name#1` of a tuple."""
    by_name: dict[str, Instruction] = {}
    for instruction in instructions:
        for operand in instruction.operands:
            for end in (match.end() for match in re.finditer(r"#\d+", operand)):
                name, (tuple_name, _, index) = operand[:end], operand[:end].rpartition("#")
                if name not in by_name and tuple_name in by_name:
                    type_ = _elements(by_name[tuple_name].type)[int(index)]
                    by_name[name] = Instruction(
                        name, type_, "get-tuple-element", (tuple_name,), f", index={index}"
                    )
                    yield by_name[name]
        by_name[instruction.name] = instruction
        yield instruction


def _elements(type_: str) -> list[str]:
    """Return the types of a tuple's elements."""
    found, depth, begin = [], 0, 1
    for index, character in enumerate(type_):
        depth += (character in "([{") - (character in ")]}")
        if (character == "," and depth == 1) or depth == 0:
            found.append(type_[begin:index].strip())
            begin = index + 1
    return found


def _instruction(line: str) -> Iterator[Instruction]:
    match = _INSTRUCTION.match(line)
    if match is None:
        return
    rest = _INDEX_COMMENT.sub("", match[3])
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    type_, call = rest[:end], rest[end:].lstrip()
    opcode = _OPCODE.match(call)
    if opcode is None:
        return
    end = _closing(call, opcode.end() - 1)
    operands = re.findall(r"%([\w.\-]+(?:#\d+)*)", call[opcode.end() : end])
    yield Instruction(
        match[2], type_, opcode[1], tuple(operands), call[end + 1 :], match[1] is not None
    )


def _closing(text: str, opening: int) -> int:
    """Return the index of the parenthesis that closes the one at `opening`."""
    depth = 0
    for index in range(opening, len(text)):
        depth += (text[index] == "(") - (text[index] == ")")
        if depth == 0:
            return index
    return len(text)
