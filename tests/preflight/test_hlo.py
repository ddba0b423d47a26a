"""XLA's programs as text, parsed."""

import pytest

from accbench.errors import RequestError
from accbench.preflight import hlo, kernels
from tests.preflight.optimized_program import PROGRAM


def test_a_program_is_computations_of_instructions():
    program = hlo.parse(PROGRAM)
    assert program.entry == "step"
    instructions = {i.name: i for i in program.computations["step"]}
    convolution, root = instructions["cudnn-conv.1"], instructions["transpose.1"]
    assert convolution.operands == ("images", "weights")
    assert convolution.attribute("dim_labels") == "b01f_o01i->b01f"
    assert convolution.source == "net/conv1/aten__convolution"
    assert convolution.num_bytes == 2 * 2 * 6 * 6 * 6 + 512
    assert root.is_root
    (*_, root_of_fusion) = program.called(instructions["loop_add_fusion"], "calls")
    assert root_of_fusion.name == "add.1"


def test_what_cannot_be_read_is_told():
    with pytest.raises(RequestError, match="cannot be read"):
        hlo.parse("nothing")
    with pytest.raises(RequestError, match="'f7'"):
        hlo.shapes("f7[2,3]")


def test_an_element_of_a_tuple_is_an_operand_of_its_own_size():
    """XLA of 2026 writes `%pair#1` where older versions have get-tuple-element."""
    text = """\
ENTRY %step (x: f16[4]) -> f32[2,3] {
  %x = f16[4]{0} parameter(0)
  %pair = (f16[4]{0}, (f32[2,3]{1,0}, u8[7]{0})) custom-call(%x), custom_call_target="two"
  %inner = f32[2,3]{1,0} copy(%pair#1#0)
  ROOT %outer = f16[4]{0} copy(%pair#0)
}
"""
    program = hlo.parse(text)
    instructions = {found.name: found for found in program.computations["step"]}
    (operand,) = instructions["outer"].operands
    assert (instructions[operand].opcode, instructions[operand].num_bytes) == (
        "get-tuple-element",
        8,
    )
    inner, outer = (k for k in kernels.list_kernels(program) if k.kind == kernels.COPY)
    assert (inner.num_bytes, outer.num_bytes) == (2 * 4 * 6, 2 * 2 * 4)
