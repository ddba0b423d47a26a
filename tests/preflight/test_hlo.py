"""XLA's programs as text, parsed."""

import pytest

from accbench.errors import RequestError
from accbench.preflight import hlo
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
