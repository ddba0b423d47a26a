"""Samplers, mostly by property: any sizes, any number of ranks."""

import itertools
import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import data as torch_data

from accbench.data import samplers
from accbench.data.samplers import (
    DistributedSampler,
    DistributedWeightedRandomSampler,
    GroupedBatchSampler,
    IterationBasedBatchSampler,
    make_batch_data_sampler,
    make_data_sampler,
)

sizes = st.integers(1, 60)
ranks = st.integers(1, 9)
flags = st.booleans()
quick = settings(max_examples=200, deadline=None)


def of_ranks(world_size: int, make) -> list:
    return [make(world_size, rank) for rank in range(world_size)]


@quick
@given(sizes, ranks, flags, flags, st.integers(0, 3))
def test_strided_is_torchs_own(size, world_size, shuffle, drop_last, epoch):
    for rank in range(world_size):
        arguments = {"shuffle": shuffle, "seed": 5, "drop_last": drop_last}
        ours = DistributedSampler(range(size), world_size, rank, **arguments)
        torchs = torch_data.DistributedSampler(range(size), world_size, rank, **arguments)
        ours.set_epoch(epoch)
        torchs.set_epoch(epoch)
        assert list(ours) == list(torchs)
        assert len(ours) == len(torchs)


@quick
@given(sizes, ranks, flags, flags, flags)
def test_ranks_share_an_epoch(size, world_size, shuffle, drop_last, contiguous):
    parts = [
        list(
            DistributedSampler(
                range(size), world_size, rank, shuffle, drop_last=drop_last, contiguous=contiguous
            )
        )
        for rank in range(world_size)
    ]
    assert len({len(part) for part in parts}) == 1
    counts = Counter(itertools.chain(*parts))
    if drop_last:
        assert len(counts) == size - size % world_size
        assert set(counts.values()) <= {1}
    else:
        padding = -size % world_size
        assert set(counts) == set(range(size))
        assert sum(counts.values()) == size + padding
        assert max(counts.values()) - min(counts.values()) <= 1
    if contiguous and not shuffle:
        assert all(b - a in (1, 1 - size) for part in parts for a, b in itertools.pairwise(part))


def resumed_epoch(make, stages: list[tuple[int, int]], last_world_size: int):
    """Read so many samples a rank at each stage, then all; what each stage's ranks read."""
    state, read = None, []
    for world_size, num_samples in [*stages, (last_world_size, None)]:
        of_stage = of_ranks(world_size, make)
        for sampler in of_stage:
            sampler.set_epoch(3)
            if state is not None:
                sampler.load_state_dict(state)
        lengths = {len(sampler) for sampler in of_stage}
        parts = [list(itertools.islice(sampler, num_samples)) for sampler in of_stage]
        if num_samples is None:
            assert lengths == {len(part) for part in parts}
        states = [sampler.state_dict(len(parts[0])) for sampler in of_stage]
        assert all(other == states[0] for other in states)
        state = states[0]
        read.append(parts)
    return read


@quick
@given(sizes, ranks, st.integers(0, 70), flags, flags)
def test_resumed_with_as_many_ranks_equals_uninterrupted(
    size, world_size, done, drop_last, contiguous
):
    def make(world_size, rank):
        return DistributedSampler(
            range(size), world_size, rank, drop_last=drop_last, contiguous=contiguous
        )

    (whole,) = resumed_epoch(make, [], world_size)
    first, middle, rest = resumed_epoch(make, [(world_size, done), (world_size, 1)], world_size)
    assert [a + b + c for a, b, c in zip(first, middle, rest, strict=True)] == whole


@quick
@given(sizes, st.lists(st.tuples(ranks, st.integers(0, 20)), max_size=3), ranks, flags)
def test_resumed_with_other_ranks_reads_each_sample_once(size, stages, last, contiguous):
    def make(world_size, rank):
        return DistributedSampler(range(size), world_size, rank, contiguous=contiguous)

    read = resumed_epoch(make, stages, last)
    counts = Counter(itertools.chain(*itertools.chain(*read)))
    assert set(counts) == set(range(size))
    # Twice come only those that fill up ranks: fewer than there are ranks, each time.
    num_padding = sum(counts.values()) - size
    assert num_padding <= sum(world_size - 1 for world_size, _ in stages) + last - 1
    if size % (world := max(last, 1)) == 0 and not stages:
        assert num_padding == 0, world


def test_resumed_with_other_ranks_where_all_divides_reads_exactly_once():
    def make(world_size, rank):
        return DistributedSampler(range(48), world_size, rank)

    read = resumed_epoch(make, [(4, 3), (2, 6)], 3)
    assert sorted(itertools.chain(*itertools.chain(*read))) == list(range(48))


def test_state_is_for_one_epoch_and_one_order():
    sampler = DistributedSampler(range(10), 1, 0)
    list(itertools.islice(sampler, 4))
    state = sampler.state_dict()
    assert len(list(sampler)) == 10
    sampler.load_state_dict(state)
    assert len(list(sampler)) == len(sampler) == 6
    sampler.set_epoch(0)
    assert len(list(sampler)) == 6
    sampler.set_epoch(1)
    assert len(list(sampler)) == 10
    for other in (
        DistributedSampler(range(11), 1, 0),
        DistributedSampler(range(10), 1, 0, seed=1),
        DistributedSampler(range(10), 1, 0, shuffle=False),
        DistributedSampler(range(10), 1, 0, contiguous=True),
    ):
        with pytest.raises(ValueError, match="the sampler's state has"):
            other.load_state_dict(state)


def test_rank_that_is_none_is_refused():
    with pytest.raises(ValueError, match="rank 2"):
        DistributedSampler(range(4), 2, 2)


@quick
@given(st.lists(st.sampled_from([0.0, 0.5, 2.0]), min_size=1).filter(any), ranks, flags)
def test_weighted_draws_are_shared(weights, world_size, replacement):
    num_positive = sum(weight > 0 for weight in weights)
    num_samples = 40 if replacement else num_positive

    def draws(world_size):
        parts = [
            list(DistributedWeightedRandomSampler(weights, num_samples, replacement, world_size, r))
            for r in range(world_size)
        ]
        in_turn = [index for step in zip(*parts, strict=True) for index in step]
        return in_turn[:num_samples]

    drawn = draws(world_size)
    assert drawn == draws(1)  # the same draws, however many share them
    assert all(weights[index] > 0 for index in drawn)
    if not replacement:
        assert sorted(drawn) == [i for i, weight in enumerate(weights) if weight > 0]


def test_weighted_draws_follow_the_weights():
    for replacement in (True, False):
        firsts = Counter()
        for seed in range(300):
            sampler = DistributedWeightedRandomSampler([1, 0, 9], 2, replacement, 1, 0, seed)
            firsts[next(iter(sampler))] += 1
        assert firsts[1] == 0
        assert 240 < firsts[2] < 295


def test_state_of_other_draws_is_refused():
    state = DistributedWeightedRandomSampler([1, 2, 3], 3, True, 1, 0).state_dict(2)
    DistributedWeightedRandomSampler([1.0, 2.0, 3.0], 3, True, 2, 0).load_state_dict(state)
    for name, other in (
        ("weights", DistributedWeightedRandomSampler([3, 2, 1], 3, True, 1, 0)),
        ("replacement", DistributedWeightedRandomSampler([1, 2, 3], 3, False, 1, 0)),
    ):
        with pytest.raises(ValueError, match=f"the sampler's state has {name}"):
            other.load_state_dict(state)


@pytest.mark.parametrize("weights", [[0, 0], [1, -1], [float("nan")], [1, 0]])
def test_weights_that_cannot_be_drawn_by(weights):
    with pytest.raises(ValueError, match="weights"):
        DistributedWeightedRandomSampler(weights, 2, replacement=False)


@quick
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 7), flags)
def test_groups_stay_apart_and_nothing_is_lost(group_ids, batch_size, drop_uneven):
    sampler = torch_data.RandomSampler(range(len(group_ids)))
    batches = GroupedBatchSampler(sampler, group_ids, batch_size, drop_uneven)
    length = len(batches)
    found = list(batches)
    assert length == len(found)
    assert all(len({group_ids[index] for index in batch}) == 1 for batch in found)
    seen = sorted(itertools.chain(*found))
    if drop_uneven:
        assert {len(batch) for batch in found} <= {batch_size}
        by_group = Counter(group_ids)
        assert len(found) == sum(count // batch_size for count in by_group.values())
    else:
        assert seen == list(range(len(group_ids)))


class Shuffled(torch_data.Sampler):
    """One that draws from Python's and numpy's own generators."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self):
        order = [*np.random.permutation(self.size).tolist(), *range(self.size)]
        random.shuffle(order)
        return iter(order)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(7)


MAKERS = {
    "random": lambda n: torch_data.RandomSampler(range(n), generator=seeded()),
    "drawn": lambda n: torch_data.RandomSampler(range(n), True, 2 * n, generator=seeded()),
    "subset": lambda n: torch_data.SubsetRandomSampler(range(0, n, 2), generator=seeded()),
    "weighted": lambda n: torch_data.WeightedRandomSampler([1.0] * n, n, generator=seeded()),
    "unseeded": lambda n: torch_data.RandomSampler(range(n), True),
    "others": Shuffled,
    "torch's distributed": lambda n: torch_data.DistributedSampler(range(n), 2, 1),
    "distributed": lambda n: DistributedSampler(range(n), 2, 1),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=4, max_size=40), st.lists(st.booleans(), min_size=4))
def test_asking_for_the_length_changes_no_order(make, group_ids, asks):
    """Before a pass, after set_epoch, within a pass and after it; and it is the right length."""

    def passes(asks: list[bool]) -> list[list[list[int]]]:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        batches = GroupedBatchSampler(make(len(group_ids)), group_ids, 3)
        found = []
        for epoch, ask in enumerate(asks):
            length = len(batches) if ask else None
            batches.set_epoch(epoch // 2)
            length = len(batches) if ask else None
            begun = iter(batches)
            first = list(itertools.islice(begun, 1))
            if ask:
                len(batches)
            found.append([*first, *begun])
            assert length in (None, len(found[-1]))
        return found

    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        assert passes(asks) == passes([False] * len(asks))
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


def test_length_is_that_of_a_state_that_was_loaded():
    sampler = DistributedSampler(range(24), 2, 0)
    batches = GroupedBatchSampler(sampler, [0, 1] * 12, 2)
    begun = sampler.state_dict(8)
    len(batches)
    assert sampler.state_dict() == sampler.state_dict(0)  # counting gave nothing out
    sampler.load_state_dict(begun)
    length = len(batches)
    found = list(batches)
    assert length == len(found)
    assert len(list(itertools.chain(*found))) == 4
    other = DistributedSampler(range(24), 2, 0)
    other.load_state_dict(begun)
    assert list(GroupedBatchSampler(other, [0, 1] * 12, 2)) == found


@pytest.mark.parametrize("start", [0, 5])
def test_length_of_what_iterations_are_made_of_changes_no_order(start):
    def batches(ask: bool) -> list[list[int]]:
        sampler = torch_data.RandomSampler(range(10), generator=seeded())
        grouped = GroupedBatchSampler(sampler, [0, 1] * 5, 2)
        if ask:
            len(grouped)
        return list(IterationBasedBatchSampler(grouped, 20, start))

    assert batches(True) == batches(False)


def test_length_asked_for_in_every_step_is_counted_once():
    class Counting(DistributedSampler):
        passes = 0

        def _order(self) -> torch.Tensor:
            Counting.passes += 1
            return super()._order()

    batches = GroupedBatchSampler(Counting(range(40), 2, 0), [0, 1] * 20, 2)
    for _ in batches:
        len(batches)
    assert Counting.passes == 2


def test_grouped_batches_come_in_the_order_of_their_first_samples():
    batches = GroupedBatchSampler(range(6), [0, 1, 1, 0, 1, 0], 2)
    assert list(batches) == [[0, 3], [1, 2], [4], [5]]


def test_group_without_a_sample_is_no_failure():
    # A rank may have none of a group at all.
    assert list(GroupedBatchSampler([0, 2], [0, 1, 0, 5], 2)) == [[0, 2]]
    assert list(GroupedBatchSampler([], [0, 1], 2)) == []


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("grouped", [True, False])
@settings(max_examples=30, deadline=None)
@given(start=st.integers(0, 25))
def test_resumed_iterations_are_the_uninterrupted_ones(distributed, grouped, start):
    class Pictures(torch_data.Dataset):
        def __len__(self) -> int:
            return 13

        def get_img_info(self, index: int) -> dict[str, int]:
            return {"height": 100 + 10 * (index % 3), "width": 110}

    def batches(start_iter: int) -> list[list[int]]:
        sampler = make_data_sampler(Pictures(), True, distributed, num_replicas=1, rank=0)
        made = make_batch_data_sampler(Pictures(), sampler, grouped, 4, 25, start_iter)
        assert len(made) == 25  # as maskrcnn-benchmark's, whose trainer takes it for the last one
        assert made.num_left == 25 - start_iter
        return list(made)

    whole = batches(0)
    assert len(whole) == 25
    assert batches(start) == whole[start:]
    assert whole[:4] != whole[4:8]


def test_empty_sampler_is_an_error_not_an_endless_loop():
    batches = IterationBasedBatchSampler(torch_data.BatchSampler([], 2, False), 5)
    with pytest.raises(ValueError, match="empty"):
        list(batches)


def test_resuming_what_cannot_be_repeated_is_refused():
    batches = torch_data.BatchSampler(torch_data.RandomSampler(range(9)), 2, False)
    with pytest.raises(ValueError, match="seeded generator"):
        IterationBasedBatchSampler(batches, 5, start_iter=1)
    with pytest.raises(ValueError, match="seeded generator"):
        IterationBasedBatchSampler(batches, 5).load_state_dict({"start_iter": 1})


def test_iterations_go_on_where_the_same_sampler_has_gone_further():
    sampler = torch_data.RandomSampler(range(10), generator=seeded())
    batches = IterationBasedBatchSampler(torch_data.BatchSampler(sampler, 3, False), 20)
    whole = list(batches)
    batches.load_state_dict({"start_iter": 6})
    assert list(batches) == whole[6:]


def test_bounds_of_aspect_ratios_can_be_given():
    class Pictures(torch_data.Dataset):
        heights = (50, 100, 150, 250)

        def __len__(self) -> int:
            return 4

        def get_img_info(self, index: int) -> dict[str, int]:
            return {"height": self.heights[index], "width": 100}

    batches = make_batch_data_sampler(Pictures(), range(4), [2.0, 0.8], 2)
    assert list(batches) == [[0], [1, 2], [3]]


def test_ranks_are_the_environments_before_there_is_a_process_group(monkeypatch):
    """Those of torchrun, or of srun's own variables."""
    assert DistributedSampler(range(4)).num_replicas == 1
    of_srun = {
        "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "1",
        "SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_STEP_NUM_TASKS": "3",
    }  # fmt: skip
    for variables in (of_srun, {"RANK": "1", "WORLD_SIZE": "2"}):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        sampler = DistributedSampler(range(6), shuffle=False)
        weighted = DistributedWeightedRandomSampler([1.0] * 6, 6)
        rank, size = (2, 3) if variables is of_srun else (1, 2)
        assert (sampler.rank, sampler.num_replicas) == (rank, size)
        assert (weighted.rank, weighted.num_replicas) == (rank, size)
        assert list(sampler) == [*range(rank, 6, size)]
    assert DistributedSampler(range(6), 4, 3).num_replicas == 4


def test_make_data_sampler_chooses():
    of_two = make_data_sampler(range(4), False, True, num_replicas=2, rank=1)
    assert isinstance(of_two, DistributedSampler)
    assert list(of_two) == [1, 3]
    assert isinstance(make_data_sampler(range(3), True, False), torch_data.RandomSampler)
    assert isinstance(make_data_sampler(range(3), False, False), torch_data.SequentialSampler)


@pytest.mark.parametrize("given", [{}, {"rank": 0}, {"num_replicas": 2}])
def test_distributed_without_a_process_group_is_refused(given):
    with pytest.raises(ValueError, match="call torch.distributed.init_process_group first"):
        make_data_sampler(range(3), True, True, **given)


def test_batch_samplers_are_torchs_with_what_callers_read():
    grouped = GroupedBatchSampler(torch_data.SequentialSampler(range(5)), [0] * 5, 2, True)
    iterations = IterationBasedBatchSampler(grouped, 9)
    for batches in (grouped, iterations):
        assert isinstance(batches, torch_data.BatchSampler)
        assert (batches.sampler, batches.batch_size, batches.drop_last) == (
            grouped.sampler,
            2,
            True,
        )
    # Of any other batches there is nothing to know.
    assert not hasattr(IterationBasedBatchSampler([[0], [1]], 3), "batch_size")


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("epoch", None), ("epoch", "1"), ("stages", None), ("stages", [[2]]), ("stages", [[0, 3]]),
     ("stages", [[2, "3"]])],
)  # fmt: skip
def test_state_that_is_none_of_a_sampler_is_one_clear_line(name, wrong):
    sampler = DistributedSampler(range(9), 2, 0)
    state = {**sampler.state_dict(), name: wrong}
    if wrong is None:
        del state[name]
    with pytest.raises(ValueError, match=f"the sampler's state has {name} .*state_dict"):
        sampler.load_state_dict(state)
    assert sampler.epoch == 0
    batches = IterationBasedBatchSampler([[0]], 5)
    with pytest.raises(ValueError, match="the sampler's state has start_iter None"):
        batches.load_state_dict({})


def test_torchs_samplers_are_torchs():
    for name in ("RandomSampler", "SequentialSampler", "SubsetRandomSampler", "BatchSampler"):
        assert getattr(samplers, name) is getattr(torch_data, name)
    assert samplers.WeightedRandomSampler is torch_data.WeightedRandomSampler


def test_ten_million_samples_take_little_memory():
    sampler = DistributedSampler(torch.empty(10_000_000, dtype=torch.uint8), 2, 1)
    assert len(list(itertools.islice(sampler, 3))) == 3
