"""Training state that torch and JAX both have: who sees what the other has written."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from accbench.distributed.process_group import Topology
from accbench.training.train_loop import train_epoch

pytest.importorskip("jax")

from accbench.engines.jax import data_mesh, state_sync  # noqa: E402


class Counting(nn.Module):
    """Replaces its buffers, as forward passes and restored checkpoints do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("table", torch.arange(2.0))
        self.register_buffer("late", None)


@pytest.fixture
def net() -> Counting:
    return Counting()


@pytest.fixture
def sync(net) -> state_sync.StateSync:
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for parameter in net.parameters():
        optimizer.state[parameter] = {"step": torch.zeros(())}
    sync = state_sync.StateSync(
        net, optimizer, None, [], data_mesh.DataMesh(Topology()), [None, None]
    )
    sync.sync_from_torch()
    return sync


def buffers_of(sync: state_sync.StateSync) -> list:
    return [array.tolist() for array in sync.local_state["buffers"]]


def step(sync: state_sync.StateSync) -> None:
    """What a compiled step does: it adds one to all parameters and buffers."""
    state = {**sync.state, "parameters": [array + 1 for array in sync.state["parameters"]]}
    sync.set_arrays(state, {"buffers": [array + 1 for array in sync.local_state["buffers"]]})


def test_a_buffer_that_is_replaced_is_the_one_that_is_trained_and_saved(net, sync):
    net.seen = net.seen + 5
    sync.sync_from_torch()
    step(sync)
    sync.sync_to_torch()
    assert net.seen.item() == 6
    assert net.state_dict()["table"].tolist() == [1, 2]


def test_each_new_tensor_of_a_buffer_is_seen_though_another_had_its_address(net, sync):
    for number in range(1, 20):
        net.seen = None
        net.seen = torch.full((1000,), float(number))  # where the one was that is synced
        sync.sync_from_torch()
        assert buffers_of(sync)[0][0] == number


def test_buffers_of_other_shapes_and_new_ones_are_taken_and_the_others_stay(net, sync):
    step(sync)
    net.table, net.late = torch.zeros(3), torch.full((1,), 7.0)
    sync.sync_from_torch()
    assert buffers_of(sync) == [1, [0, 0, 0], [7]]  # the first one is newer than torch's
    step(sync)
    sync.sync_to_torch()
    assert (net.seen.item(), net.table.tolist(), net.late.tolist()) == (2, [1, 1, 1], [8])
    net.late = None
    sync.sync_from_torch()
    assert buffers_of(sync) == [2, [1, 1, 1]]


def test_weights_that_torch_has_written_are_those_that_are_scored(net, sync):
    step(sync)
    sync.sync_to_torch()
    sync.gather("parameters")
    with torch.no_grad():
        net.linear.weight.fill_(3)
    sync.sync_from_torch()
    weight, _ = sync.gather("parameters")
    assert weight.tolist() == [[3, 3], [3, 3]]


class Clamped(nn.Linear):
    """Has its weights below one while it trains."""

    def train(self, mode: bool = True) -> "Clamped":
        with torch.no_grad():
            self.weight.clamp_(max=1.0)
        return super().train(mode)


@pytest.mark.parametrize("kind", [Clamped, nn.Linear])
def test_a_model_that_writes_in_train_has_what_the_epoch_before_has_trained(kind):
    net = kind(1, 1)
    nn.init.zeros_(net.weight)
    synced = []

    def gather_state() -> None:
        synced.append(True)
        with torch.no_grad():
            net.weight.fill_(0.5)  # as the device has it

    engine = SimpleNamespace(gather_state=gather_state, task=SimpleNamespace(max_steps=None))
    loader = type("Loader", (list,), {"set_epoch": lambda self, epoch: None})()
    labels = SimpleNamespace(device_batches=lambda loader: (batch for batch in loader))
    timer = SimpleNamespace(
        start=lambda epoch: None, batches=iter, close_window=lambda: None, num_steps=0
    )
    train_epoch(engine, nn.Sequential(net), None, None, loader, labels, timer, 1, print)  # type: ignore[arg-type]
    assert synced == [True] * (kind is Clamped)
    assert net.weight.item() == (0.5 if kind is Clamped else 0)
