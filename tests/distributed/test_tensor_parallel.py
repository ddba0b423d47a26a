"""Plans by which tensor parallelism cuts layers: what they do to weights, and what is refused."""

from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from accbench.distributed.collectives import RankGroup
from accbench.distributed.replicated_gradients import ReplicatedGradientCheck
from accbench.distributed.tensor_slices import TensorSlice
from accbench.engines.common import activation_checkpointing, tensor_parallel
from accbench.errors import RequestError
from tests.conftest import TINY, python, run

GROUP = RankGroup("", 1, 2)


@given(
    st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2), st.integers(1, 3)
)
def test_all_parts_together_are_the_tensor(num_ranks, num_fused, length, axis, other):
    shape = [other] * 3
    shape[axis] = num_ranks * num_fused * length
    whole = torch.randn(shape)
    parts = [
        TensorSlice(tuple(shape), axis, rank, num_ranks, num_fused) for rank in range(num_ranks)
    ]
    cut = [part.cut(whole) for part in parts]
    assert {tuple(part.shape) for part in cut} == {
        tuple(n // num_ranks if index == axis else n for index, n in enumerate(shape))
    }
    assert torch.equal(parts[0].join(cut), whole)


class Attention(nn.Module):
    """Two heads of four."""

    head_dim = 4
    num_heads = 2

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)


class Net(nn.Module):
    """An embedding that is tied to the head, attention, and one layer more."""

    def __init__(self, vocabulary: int = 6) -> None:
        super().__init__()
        self.embedding, self.head = (
            nn.Embedding(vocabulary, 8),
            nn.Linear(8, vocabulary, bias=False),
        )
        self.head.weight = self.embedding.weight
        self.attention, self.other = Attention(), nn.Linear(8, 8)
        self.torchs = nn.MultiheadAttention(8, 2)


PLAN = {
    "embedding": "embedding_rowwise", "head": "colwise_gather_output",
    "attention": "divide:num_heads", "attention.qkv": "packed_colwise:3",
    "attention.proj": "rowwise",
}  # fmt: skip


def test_a_rank_keeps_its_heads_of_each_fused_layer_and_ties_stay():
    net = Net()
    qkv, proj, words = (
        layer.weight.detach().clone() for layer in (net.attention.qkv, net.attention.proj, net.head)
    )
    slices = tensor_parallel.parallelize(net, PLAN, GROUP)
    assert {*slices} == {
        "embedding.weight", "attention.qkv.weight", "attention.qkv.bias", "attention.proj.weight"
    }  # fmt: skip
    assert torch.equal(
        net.attention.qkv.weight, qkv[[*range(4, 8), *range(12, 16), *range(20, 24)]]
    )
    assert torch.equal(net.attention.proj.weight, proj[:, 4:])
    assert net.attention.proj.bias.shape == (8,)
    assert net.head.weight is net.embedding.weight
    assert torch.equal(net.head.weight, words[3:])
    assert net.attention.num_heads == 1
    assert {*net.state_dict()} == {*Net().state_dict()}


def test_a_vocabulary_that_cannot_be_cut_stays_whole():
    net = Net(vocabulary=7)
    slices = tensor_parallel.parallelize(net, PLAN, GROUP)
    assert "embedding.weight" not in slices
    assert type(net.head) is nn.Linear
    assert net.head.weight is net.embedding.weight


@pytest.mark.parametrize(("change", "line"), [
    ({"head": None}, "--tp: head.weight is tied to a weight that the plan cuts, and head is not in "
     "the plan"),
    ({"head": "rowwise"}, "--tp: head.weight is tied to what is cut in another way"),
    ({"missing.*": "colwise"}, "--tp: the model has no module missing.*, which its plan names"),
    ({"other": "sideways"}, "--tp: other is to be cut 'sideways'; there are: colwise, "),
    ({"other": "colwise:2"}, "--tp: other is to be cut colwise:2; no such way is known"),
    ({"attention": "divide:heads"}, "--tp: attention has no size heads, which its plan names"),
    ({"": "replicated_with_grad_allreduce"}, "--tp: the network itself has no parameters of its "
     "own, whose gradients are summed"),
])  # fmt: skip
def test_a_plan_that_does_not_fit_is_refused_in_a_line(change, line):
    plan = {name: style for name, style in {**PLAN, **change}.items() if style is not None}
    with pytest.raises(RequestError) as caught:
        tensor_parallel.parallelize(Net(), plan, GROUP)
    assert str(caught.value).startswith(line)


def test_attention_is_cut_between_heads():
    plan = {"attention.qkv": "packed_colwise:3"}
    with pytest.raises(RequestError, match=r"--tp 4: attention.qkv has 2 heads; use --tp 1 or 2"):
        tensor_parallel.parallelize(Net(), plan, RankGroup("", 0, 4))
    net = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2, add_zero_attn=True)})
    with pytest.raises(RequestError, match="has keys of another width or of its own"):
        tensor_parallel.parallelize(net, {"attention": "multihead_attention"}, GROUP)


def test_a_checkpointed_layer_is_refused():
    """It would compute with its part as if that were the whole."""
    net = Net()
    activation_checkpointing.apply(net.attention, ["Linear"])
    with pytest.raises(RequestError, match="--tp changes how Linear computes; leave it out of "):
        tensor_parallel.parallelize(net, PLAN, GROUP)


def test_a_plan_is_found_in_a_part_of_the_network():
    net = Net()
    net.attention.tensor_parallel_plan = {"qkv": "packed_colwise:3", "proj": "rowwise"}
    assert tensor_parallel.find_plan(net) == {
        "attention.qkv": "packed_colwise:3", "attention.proj": "rowwise"
    }  # fmt: skip
    assert tensor_parallel.find_plan(nn.Linear(2, 2)) == {}


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_transformers_own_plans_are_taken():
    """That of stages, too: the import takes longer than all else."""
    done = python("-m", "tests.distributed.apart", "plans")
    assert done.returncode == 0, done.stderr
    stages = ["model.embed_tokens", "model.layers.*", "model.norm", "lm_head"]
    assert done.stdout.split() == [*stages, "0", "1"]


def test_gathered_logits_are_no_view():
    # FSDP's hook on an output goes where a model changes a view of it in place.
    done = python("-m", "tests.distributed.apart", "logits")
    assert done.stdout.strip() == "[2, 3, 6] False True", done.stderr


class TwoRanks:
    """A group of this rank and another, which has gradients of its own."""

    def __init__(self, monkeypatch) -> None:
        self.check = ReplicatedGradientCheck(self, torch.device("cpu"))
        self.num_gathers = 0
        monkeypatch.setattr(dist, "all_gather", self._gather)

    def size(self) -> int:
        return 2

    def _gather(self, gathered, own, group) -> None:
        self.num_gathers += 1
        gathered[0].copy_(own)
        gathered[1].copy_(torch.stack([*map(self.check._summary, self.others)]))

    def step(self, own: list, other: list) -> None:
        self.others = [None if value is None else torch.tensor(value) for value in other]
        values = [None if value is None else torch.tensor(value) for value in own]
        self.check.check({f"p{index}": value for index, value in enumerate(values)})


@pytest.mark.parametrize("other", [[3.0, 3.0], [-1.0, -2.0], [0.0, 0.0]])
def test_parts_of_a_gradient_are_refused(monkeypatch, other):
    ranks = TwoRanks(monkeypatch)
    with pytest.raises(RequestError, match="--tp 2: workers have different gradients of p1, which"):
        ranks.step([[5.0], [1.0, 2.0]], [[5.0], other])


def test_gradients_are_compared_in_the_first_steps_that_have_any(monkeypatch):
    ranks = TwoRanks(monkeypatch)
    ranks.step([[float("inf")], [1.0]], [[1.0], [2.0]])  # the loss scale is too large
    ranks.step([[5.0], [1e-7]], [[5.0], [-1e-7]])  # nothing but rounding
    ranks.step([[5.0], None], [[5.0], None])
    with pytest.raises(RequestError, match="p1"):
        ranks.step([[5.0], [1.0]], [[5.0], [2.0]])
    ranks.step([[5.0], [1.0]], [[5.0], [2.0]])
    assert ranks.num_gathers == 4


def test_a_trained_slope_between_cut_layers_is_refused_in_the_first_step(tmp_path):
    model = "--model=tests.distributed.decoders:with_slopes"
    done = run(*TINY, model, "--seq_len=16", "--data=synthetic", "--nproc_per_node=2", "--tp=2",
               f"--output_dir={tmp_path / 'run'}")  # fmt: skip
    assert done.returncode == 2, done.stderr
    (told,) = done.stderr.splitlines()
    assert "--tp 2: workers have different gradients of blocks.0.mlp.1.weight, which" in told
