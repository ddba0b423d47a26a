"""The kernels of a compiled program in order, with their bytes and floating-point operations.

Bytes are the memory traffic if every operand is read once and every result written once. An
operand that is only sliced counts as its slices, a result that is updated in place as its update.
XLA's own cost analysis counts cuDNN's convolutions as nothing.
"""

import dataclasses
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from accbench.preflight.hlo import Instruction, Program, Shape

CONVOLUTION, PRODUCT, TRITON = "convolution", "matrix product", "Triton"
LOOP, REDUCTION, COPY, TRANSPOSE = "loop fusion", "reduction fusion", "copy", "transpose"
ATTENTION = "attention"
COLLECTIVE, LIBRARY, OTHER, DONE = "all-reduce", "library call", "other", "done"
GATHER = "all-gather"
BETWEEN_GPUS = (COLLECTIVE, GATHER)
_FUSIONS = {"kLoop": LOOP, "kInput": REDUCTION, "kCustom": TRITON, "kOutput": LOOP}
# Opcodes that run nothing on the device.
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id",
    "replica-id", "opt-barrier", "add-dependency",
}  # fmt: skip
_SLICES = ("slice", "dynamic-slice", "gather")
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_GROUPS = re.compile(
    r"(?:replica_groups|source_target_pairs)="
    r"(\{\{.*?\}\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)"
)
_TO_HOST = ("infeed", "outfeed", "send", "recv", "send-done", "recv-done")
_HOST_MEMORY = "S(5)"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel launch."""

    name: str
    kind: str
    num_bytes: int
    flops: int = 0
    factors: str = "f32"
    """Element type of the factors of a product."""
    results: tuple[Shape, ...] = ()
    source: str = ""
    layout: str = ""
    """XLA's dimension labels of a convolution."""
    of_weights: bool = False
    """Whether it computes the gradient of a convolution's weights."""
    to_host: bool = False
    repeats: int = 1
    waits_for: tuple[str, ...] = ()
    """For kind `done`: the kernels that it waits for."""
    opcode: str = ""
    """XLA's name of a collective, such as `all-gather`."""
    replica_groups: str = ""
    """A collective's groups of ranks, or a permute's pairs, as the program has them."""

    @property
    def is_product(self) -> bool:
        """Whether it multiplies matrices or convolves, as tensor cores can."""
        return self.flops > 0


def list_kernels(program: Program) -> list[Kernel]:
    """Return the program's kernels in scheduled order."""
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
            branch_names = re.findall(r"%([\w.\-]+)", names[1]) if names else []
            branches = [
                list(_walk(program, program.computations[name], repeats)) for name in branch_names
            ]
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


def _kernel(program: Program, instruction: Instruction, operands: list[Instruction]) -> Kernel:
    moved = sum(operand.num_bytes for operand in operands) + instruction.num_bytes
    if instruction.opcode == "fusion":
        return _fusion(program, instruction)
    if instruction.opcode == "custom-call":
        return _library_call(instruction, operands, moved)
    if instruction.opcode.endswith("-done"):
        return Kernel(instruction.name, DONE, 0, waits_for=instruction.operands)
    inner = [instruction]
    if instruction.opcode == "async-start":
        inner = program.called(instruction, "calls")
    for collective in (found for found in inner if found.opcode.startswith(_COLLECTIVES)):
        opcode = collective.opcode.removesuffix("-start")
        groups = _GROUPS.search(collective.attributes)
        # The type of an asynchronous one holds operands and results; only operands count.
        return Kernel(
            instruction.name, GATHER if opcode == "all-gather" else COLLECTIVE,
            sum(operand.num_bytes for operand in operands),
            opcode=opcode, replica_groups=groups[1] if groups else "",
        )  # fmt: skip
    if instruction.opcode in ("copy", "copy-start"):
        return Kernel(instruction.name, COPY, moved)
    if instruction.opcode == "dot":
        factors, flops = _dot(instruction, operands)
        return Kernel(instruction.name, PRODUCT, moved, flops, factors)
    return Kernel(
        instruction.name, TRANSPOSE if instruction.opcode == "transpose" else OTHER, moved
    )


def _fusion(program: Program, instruction: Instruction) -> Kernel:
    body = program.called(instruction, "calls")
    by_name = {inner.name: inner for inner in body}
    users: dict[str, list[Instruction]] = defaultdict(list)
    for inner in body:
        for name in inner.operands:
            users[name].append(inner)
    moved, updated = _bytes_written(body, by_name, instruction)
    for inner in body:
        if inner.opcode == "parameter" and inner.name not in updated:
            moved += _bytes_read(inner, users)
    flops, factors = 0, "f32"
    for inner in body:
        if inner.opcode == "dot":
            operands = [by_name[name] for name in inner.operands if name in by_name]
            factors, dot_flops = _dot(inner, operands)
            flops += dot_flops
    kind = _FUSIONS.get(instruction.attribute("kind") or "", OTHER)
    if flops:
        kind = PRODUCT
    elif kind == TRITON and '"kind":"__triton' not in instruction.attributes:
        kind = COPY  # dynamic slices, by address computation or by a copy
    elif kind in (LOOP, REDUCTION) and instruction.name.startswith(("transpose", "loop_transpose",
                                                            "input_transpose")):  # fmt: skip
        kind = TRANSPOSE
    return Kernel(instruction.name, kind, moved, flops, factors)


def _bytes_read(parameter: Instruction, users: dict[str, list[Instruction]]) -> int:
    """Return the bytes that a fusion reads from one of its operands."""
    readers = users[parameter.name]
    while len(readers) == 1 and readers[0].opcode == "bitcast":
        readers = users[readers[0].name]
    if readers and all(reader.opcode in _SLICES for reader in readers):
        return min(parameter.num_bytes, sum(reader.num_bytes for reader in readers))
    return parameter.num_bytes


def _bytes_written(
    body: list[Instruction], by_name: dict[str, Instruction], instruction: Instruction
) -> tuple[int, set[str]]:
    """Return the bytes that a fusion writes, and the parameters that it only updates in place."""
    root = next((inner for inner in body if inner.is_root), None)
    roots = [root] if root is not None else []
    if root is not None and root.opcode == "tuple":
        roots = [by_name[name] for name in root.operands if name in by_name]
    if not any(inner.opcode == "dynamic-update-slice" for inner in roots):
        return instruction.num_bytes, set()
    total, updated = 0, set()
    for inner in roots:
        target = by_name.get(inner.operands[0]) if inner.operands else None
        if inner.opcode == "dynamic-update-slice" and target is not None:
            total += by_name[inner.operands[1]].num_bytes
            updated |= {target.name} if target.opcode == "parameter" else set()
        else:
            total += inner.num_bytes
    return total, updated


def _library_call(instruction: Instruction, operands: list[Instruction], moved: int) -> Kernel:
    target = instruction.attribute("custom_call_target") or ""
    if "cudnn$conv" in target:
        flops, of_weights = _convolution(instruction, operands, target)
        return Kernel(
            instruction.name, CONVOLUTION, moved, flops, operands[0].shapes[0].element_type,
            layout=instruction.attribute("dim_labels") or "", of_weights=of_weights,
        )  # fmt: skip
    if "cublas" in target:
        factors, flops = _gemm(instruction, operands)
        return Kernel(instruction.name, PRODUCT, moved, flops, factors)
    if "cudnn$fmha" in target:
        workspace = sum(s.num_bytes for s in instruction.shapes if s.element_type == "u8")
        return Kernel(
            instruction.name, ATTENTION, moved - workspace,
            _attention_flops(instruction, operands, target), operands[0].shapes[0].element_type,
        )  # fmt: skip
    if target == "__triton_kernel_call":
        return Kernel(instruction.name, TRITON, moved)
    return Kernel(instruction.name, LIBRARY, moved)


def _convolution(
    instruction: Instruction, operands: list[Instruction], target: str
) -> tuple[int, bool]:
    """Return (floating-point operations, whether it computes the weights' gradient)."""
    images, kernel, result = (
        operands[0].shapes[0], operands[1].shapes[0], instruction.shapes[0],
    )  # fmt: skip
    if target.endswith("BackwardFilter"):
        kernel, result = result, kernel
    elif target.endswith("BackwardInput"):
        images, result = result, images
    labels = (instruction.attribute("dim_labels") or "").split("->")[0].partition("_")[2]
    flops = 2 * result.num_elements
    for label, size in zip(labels, kernel.dimensions, strict=True):
        flops *= 1 if label == "o" else size  # `i` counts only the channels of a single group
    return flops, target.endswith("BackwardFilter")


def _attention_flops(instruction: Instruction, operands: list[Instruction], target: str) -> int:
    """Return the operations of attention's products: two forward, and five backward.

    The backward pass computes the scores again. A causal one skips what no query sees, half of it.
    """
    config = re.search(
        r'"intermediate_tensor_shape":\{.*?"dimensions":(\[.*?\])', instruction.attributes
    )
    scores = [int(size) for size in json.loads(config[1])] if config else []
    num_products = 5 if target.endswith("Backward") else 2
    flops = 2 * num_products * math.prod(scores) * operands[0].shapes[0].dimensions[-1]
    return flops // 2 if '"mask_type":"CAUSAL"' in instruction.attributes else flops


def _dot(instruction: Instruction, operands: list[Instruction]) -> tuple[str, int]:
    left = operands[0].shapes[0]
    contracted = [
        int(d) for d in (instruction.attribute("lhs_contracting_dims") or "").split(",") if d
    ]
    return left.element_type, _matmul_flops(instruction.shapes[0], left, contracted)


def _gemm(instruction: Instruction, operands: list[Instruction]) -> tuple[str, int]:
    config = re.search(r'"dot_dimension_numbers":(\{.*?\})', instruction.attributes)
    numbers = json.loads(config[1]) if config else {}
    left = operands[0].shapes[0]
    contracted = [int(d) for d in numbers.get("lhs_contracting_dimensions", [])]
    return left.element_type, _matmul_flops(instruction.shapes[0], left, contracted)


def _matmul_flops(result: Shape, left: Shape, contracted: list[int]) -> int:
    flops = 2 * result.num_elements
    for dimension in contracted:
        flops *= left.dimensions[dimension]
    return flops
