"""Plans by which ranks share the sequence between cut layers, and what is refused of them."""

import pytest
import torch
from torch import nn

from accbench.distributed.collectives import RankGroup
from accbench.engines.common import sequence_parallel, tensor_parallel
from accbench.errors import RequestError

GROUP = RankGroup("", 1, 2)


class Block(nn.Module):
    """A norm, an MLP whose second layer has a bias, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(8), nn.Dropout(0.5)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.mlp(self.norm(x)))


class Net(nn.Module):
    """Two blocks between an embedding and a norm with a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 6)
        self.tensor_parallel_plan = {"blocks.*.mlp.0": "colwise", "blocks.*.mlp.2": "rowwise"}
        self.sequence_parallel_plan = PLAN

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embed(x))))


PLAN = {
    "blocks": "scatter_input", "blocks.*.norm": "sequence_parallel",
    "blocks.*.drop": "sequence_parallel", "blocks.*.mlp": "gather_input", "norm": "gather_output",
}  # fmt: skip


def share(plan: dict[str, str], net: Net | None = None) -> frozenset[str]:
    net = Net() if net is None else net
    cut = tensor_parallel.parallelize_by_own_plan(net, GROUP, "net")
    return sequence_parallel.parallelize(net, plan, GROUP, cut)


def test_gradients_of_what_computes_with_parts_are_to_be_summed():
    net = Net()
    names = {name for name, _ in net.named_parameters()}
    of_blocks = {f"blocks.{i}.{name}" for i in (0, 1)
                 for name in ("norm.weight", "norm.bias", "mlp.2.bias")}  # fmt: skip
    assert share(PLAN, net) == of_blocks | {"norm.weight", "norm.bias"}
    assert {name for name, _ in net.named_parameters()} == names
    assert {*net.state_dict()} == names
    assert type(net.blocks[0]) is type(net.blocks[1]) is Block


@pytest.mark.parametrize(("change", "line"), [
    ({"layers.*": "sequence_parallel"}, "--sequence_parallel: the model has no module layers.*, "
     "which its plan names"),
    ({"head": "parts"}, "--sequence_parallel: the plan says 'parts' of head; there are: "
     "scatter_input, sequence_parallel, gather_output, gather_input"),
    ({"head": "gather_output"}, "--sequence_parallel: the plan says gather_output of 2 modules, "
     "not of one"),
    ({"blocks": None}, "--sequence_parallel: the plan says scatter_input of 0 modules, not of one"),
    ({"blocks.*.mlp": None}, "--sequence_parallel: --tp cuts blocks.0.mlp.0 by outputs, and it is "
     "in no module of which the plan says gather_input"),
    ({"blocks.*.norm": None}, "--sequence_parallel: neither plan of the model says anything of "
     "blocks.0.norm.weight, which is in a block"),
])  # fmt: skip
def test_a_plan_that_does_not_fit_is_refused_in_a_line(change, line):
    plan = {name: word for name, word in {**PLAN, **change}.items() if word is not None}
    with pytest.raises(RequestError) as caught:
        share(plan)
    assert str(caught.value) == line


def test_a_model_without_a_plan_and_an_odd_sequence_are_refused():
    with pytest.raises(RequestError, match="--model net has no plan for --sequence_parallel"):
        sequence_parallel.parallelize_by_own_plan(nn.Linear(2, 2), GROUP, "net", {})
    net = Net()
    share(PLAN, net)
    with pytest.raises(RequestError, match="sequences of 5 are no multiple of --tp 2"):
        net(torch.zeros(2, 5, 4))


def test_what_cannot_be_shared_is_refused():
    net = nn.ModuleDict({"a": nn.Identity(), "attention": nn.MultiheadAttention(8, 2),
                         "b": nn.Identity()})  # fmt: skip
    plan = {"a": "scatter_input", "attention": "gather_input", "b": "gather_output"}
    tensor_parallel.parallelize(
        net, {"attention": "multihead_attention", "attention.out_proj": "rowwise"}, GROUP
    )
    with pytest.raises(RequestError, match="attention takes the batch second"):
        sequence_parallel.parallelize(net, plan, GROUP, {})
    tied = Net()
    tied.after = nn.LayerNorm(8)
    tied.after.weight = tied.norm.weight
    with pytest.raises(RequestError, match="norm.weight is tied to what computes with whole seq"):
        share(PLAN, tied)
    checkpointed = Net()
    checkpointed.blocks[0].drop.forward = lambda x: x
    with pytest.raises(RequestError, match="how Dropout computes; leave it out of --checkpoint"):
        share(PLAN, checkpointed)


def test_gradients_that_the_plan_of_layers_sums_are_not_summed_again():
    def net() -> Net:
        with_slopes = Net()
        for block in with_slopes.blocks:
            block.mlp[1] = nn.PReLU()
        with_slopes.tensor_parallel_plan["blocks.*.mlp.1"] = "replicated_with_grad_allreduce"
        return with_slopes

    assert not any("mlp.1" in name for name in share(PLAN, net()))
    with pytest.raises(RequestError, match="sums the gradients of blocks.0.mlp.1, and so does the"):
        share({**PLAN, "blocks.*.mlp.1": "sequence_parallel"}, net())
