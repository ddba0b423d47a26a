"""What a compiled program runs, in order: bytes and floating-point operations of each kernel.

Bytes are those that must cross the memory's bus if every operand is read once and every result
written once: of an operand that is only sliced, the slices, of a result that is updated in place,
the update. XLA's own cost analysis counts cuDNN's convolutions as nothing.
"""

import dataclasses
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from accbench.preflight.hlo import Instruction, Program, Shape

CONVOLUTION, PRODUCT, TRITON = "convolution", "matrix product", "Triton"
LOOP, REDUCTION, COPY, TRANSPOSE = "loop fusion", "reduction fusion", "copy", "transpose"
COLLECTIVE, LIBRARY, OTHER, DONE = "all-reduce", "library call", "other", "done"
GATHER = "all-gather"
BETWEEN_GPUS = (COLLECTIVE, GATHER)
_FUSIONS = {"kLoop": LOOP, "kInput": REDUCTION, "kCustom": TRITON, "kOutput": LOOP}
# These run nothing on the device.
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id",
    "replica-id", "opt-barrier", "add-dependency",
}  # fmt: skip
_SLICES = ("slice", "dynamic-slice", "gather")
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_TO_HOST = ("infeed", "outfeed", "send", "recv", "send-done", "recv-done")
_HOST_MEMORY = "S(5)"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One launch."""

    name: str
    kind: str
    num_bytes: int
    flops: int = 0
    factors: str = "f32"
    """Element type of what is multiplied."""
    results: tuple[Shape, ...] = ()
    source: str = ""
    layout: str = ""
    """Of a convolution: XLA's dimension labels."""
    of_weights: bool = False
    """Whether it computes the gradient of a convolution's weights."""
    to_host: bool = False
    repeats: int = 1
    waits_for: tuple[str, ...] = ()
    """Of a kind `done`: the kernels whose end it waits for."""

    @property
    def is_product(self) -> bool:
        """Whether tensor cores can do it."""
        return self.flops > 0


def of_program(program: Program) -> list[Kernel]:
    """The kernels in the order in which they are scheduled."""
    return list(_walk(program, program.computations[program.entry], 1))


def _walk(program: Program, instructions: Sequence[Instruction], repeats: int) -> Iterator[Kernel]:
    by_name = {instruction.name: instruction for instruction in instructions}
    for instruction in instructions:
        opcode = instruction.opcode
        if opcode in _FREE:
            continue
        if opcode == "call":
            yield from _walk(program, program.called(instruction, "to_apply"), repeats)
        elif opcode == "while":
            times = re.search(r'"known_trip_count":\{"n":"(\d+)"', instruction.attributes)
            body = program.called(instruction, "body")
            yield from _walk(program, body, repeats * int(times[1] if times else 1))
        elif opcode == "conditional":
            names = re.search(r"branch_computations=\{([^}]*)\}", instruction.attributes)
            names = names or re.search(r"(true_computation=.*)", instruction.attributes)
            found = re.findall(r"%([\w.\-]+)", names[1]) if names else []
            branches = [list(_walk(program, program.computations[n], repeats)) for n in found]
            yield from max(branches, key=lambda ks: sum(k.num_bytes for k in ks), default=[])
        else:
            operands = [by_name[name] for name in instruction.operands if name in by_name]
            kernel = _kernel(program, instruction, operands)
            yield dataclasses.replace(
                kernel,
                results=tuple(instruction.shapes) if kernel.kind != DONE else (),
                source=instruction.source,
                repeats=repeats,
                to_host=opcode in _TO_HOST or _HOST_MEMORY in instruction.type,
            )


def _kernel(program: Program, one: Instruction, operands: list[Instruction]) -> Kernel:
    moved = sum(operand.num_bytes for operand in operands) + one.num_bytes
    if one.opcode == "fusion":
        return _fusion(program, one)
    if one.opcode == "custom-call":
        return _library_call(one, operands, moved)
    if one.opcode.endswith("-done"):
        return Kernel(one.name, DONE, 0, waits_for=one.operands)
    opcodes = [one.opcode]
    if one.opcode == "async-start":
        opcodes = [inner.opcode for inner in program.called(one, "calls")]
    if any(opcode.startswith(_COLLECTIVES) for opcode in opcodes):
        kind = GATHER if opcodes[-1].startswith("all-gather") else COLLECTIVE
        # Its type has them twice where it is asynchronous: what goes in and what comes out.
        return Kernel(one.name, kind, sum(operand.num_bytes for operand in operands))
    if one.opcode in ("copy", "copy-start"):
        return Kernel(one.name, COPY, moved)
    if one.opcode == "dot":
        factors, flops = _dot(one, operands)
        return Kernel(one.name, PRODUCT, moved, flops, factors)
    return Kernel(one.name, TRANSPOSE if one.opcode == "transpose" else OTHER, moved)


def _fusion(program: Program, one: Instruction) -> Kernel:
    body = program.called(one, "calls")
    by_name = {inner.name: inner for inner in body}
    users: dict[str, list[Instruction]] = defaultdict(list)
    for inner in body:
        for name in inner.operands:
            users[name].append(inner)
    moved, updated = _written(body, by_name, one)
    for inner in body:
        if inner.opcode == "parameter" and inner.name not in updated:
            moved += _read(inner, users)
    flops, factors = 0, "f32"
    for inner in body:
        if inner.opcode == "dot":
            operands = [by_name[name] for name in inner.operands if name in by_name]
            factors, own = _dot(inner, operands)
            flops += own
    kind = _FUSIONS.get(one.attribute("kind") or "", OTHER)
    if flops:
        kind = PRODUCT
    elif kind == TRITON and '"kind":"__triton' not in one.attributes:
        kind = COPY  # dynamic slices, made by address alone or by a copy
    elif kind in (LOOP, REDUCTION) and one.name.startswith(("transpose", "loop_transpose",
                                                            "input_transpose")):  # fmt: skip
        kind = TRANSPOSE
    return Kernel(one.name, kind, moved, flops, factors)


def _read(parameter: Instruction, users: dict[str, list[Instruction]]) -> int:
    """Bytes that a fusion reads of one of its operands."""
    mine = users[parameter.name]
    while len(mine) == 1 and mine[0].opcode == "bitcast":
        mine = users[mine[0].name]
    if mine and all(user.opcode in _SLICES for user in mine):
        return min(parameter.num_bytes, sum(user.num_bytes for user in mine))
    return parameter.num_bytes


def _written(
    body: list[Instruction], by_name: dict[str, Instruction], one: Instruction
) -> tuple[int, set[str]]:
    """Bytes that a fusion writes, and parameters that are only updated in place."""
    root = next((inner for inner in body if inner.is_root), None)
    roots = [root] if root is not None else []
    if root is not None and root.opcode == "tuple":
        roots = [by_name[name] for name in root.operands if name in by_name]
    if not any(inner.opcode == "dynamic-update-slice" for inner in roots):
        return one.num_bytes, set()
    total, updated = 0, set()
    for inner in roots:
        target = by_name.get(inner.operands[0]) if inner.operands else None
        if inner.opcode == "dynamic-update-slice" and target is not None:
            total += by_name[inner.operands[1]].num_bytes
            updated |= {target.name} if target.opcode == "parameter" else set()
        else:
            total += inner.num_bytes
    return total, updated


def _library_call(one: Instruction, operands: list[Instruction], moved: int) -> Kernel:
    target = one.attribute("custom_call_target") or ""
    if "cudnn$conv" in target:
        flops, of_weights = _convolution(one, operands, target)
        return Kernel(
            one.name, CONVOLUTION, moved, flops, operands[0].shapes[0].element_type,
            layout=one.attribute("dim_labels") or "", of_weights=of_weights,
        )  # fmt: skip
    if "cublas" in target:
        factors, flops = _gemm(one, operands)
        return Kernel(one.name, PRODUCT, moved, flops, factors)
    if target == "__triton_kernel_call":
        return Kernel(one.name, TRITON, moved)
    return Kernel(one.name, LIBRARY, moved)


def _convolution(one: Instruction, operands: list[Instruction], target: str) -> tuple[int, bool]:
    """(multiplications and additions, whether it is a weight's gradient)."""
    given, kernel, result = (
        operands[0].shapes[0], operands[1].shapes[0], one.shapes[0],
    )  # fmt: skip
    if target.endswith("BackwardFilter"):
        kernel, result = result, kernel
    elif target.endswith("BackwardInput"):
        given, result = result, given
    labels = (one.attribute("dim_labels") or "").split("->")[0].partition("_")[2]
    flops = 2 * result.num_elements
    for label, size in zip(labels, kernel.dimensions, strict=True):
        flops *= 1 if label == "o" else size  # `i` counts a group's channels alone
    return flops, target.endswith("BackwardFilter")


def _dot(one: Instruction, operands: list[Instruction]) -> tuple[str, int]:
    left = operands[0].shapes[0]
    contracted = [int(d) for d in (one.attribute("lhs_contracting_dims") or "").split(",") if d]
    return left.element_type, _product_flops(one.shapes[0], left, contracted)


def _gemm(one: Instruction, operands: list[Instruction]) -> tuple[str, int]:
    config = re.search(r'"dot_dimension_numbers":(\{.*?\})', one.attributes)
    numbers = json.loads(config[1]) if config else {}
    left = operands[0].shapes[0]
    contracted = [int(d) for d in numbers.get("lhs_contracting_dimensions", [])]
    return left.element_type, _product_flops(one.shapes[0], left, contracted)


def _product_flops(result: Shape, left: Shape, contracted: list[int]) -> int:
    flops = 2 * result.num_elements
    for dimension in contracted:
        flops *= left.dimensions[dimension]
    return flops
