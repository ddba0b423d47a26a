"""The model of a step on many devices: its limits, and that the docs show what it says."""

import dataclasses
import runpy
import sys

import pytest

from benchmarks import scaling_fit
from benchmarks.scaling_fit import Cluster, Link, TrainingStep
from tests.conftest import ROOT

NVLINK, NETWORK = Link(370e9, 3.4e-6, 1.2e-6), Link(376e9, 9.6e-6, 8.5e-6)
CLUSTER = Cluster(8, NVLINK, NETWORK)
SLOW = dataclasses.replace(CLUSTER, between=Link(3e9, 9.6e-6, 8.5e-6))
WITHOUT_LATENCY = Cluster(
    8, Link(100e9, 0.0, 0.0), Link(40e9, 0.0, 0.0), ring_start_s=0.0, tree_start_s=0.0
)
STEP = TrainingStep(0.1, 100e6)
DEVICES = (1, 2, 4, 8, 16, 64, 256, 1024)


@pytest.mark.parametrize("way", scaling_fit.ALGORITHMS.values())
def test_one_device_reduces_nothing_and_more_devices_never_less(way):
    assert way(1e9, CLUSTER, 1) == 0
    for cluster in (CLUSTER, SLOW):
        for num_bytes in (1e3, 1e6, 1e9):
            times = [way(num_bytes, cluster, num) for num in DEVICES]
            assert times == sorted(times)


def test_a_ring_sends_twice_the_bytes_over_its_slowest_link():
    assert scaling_fit.ring_s(1e9, WITHOUT_LATENCY, 8) == pytest.approx(2 * 7 / 8 * 1e9 / 100e9)
    assert scaling_fit.ring_s(1e9, WITHOUT_LATENCY, 1024) == pytest.approx(2 * 1e9 / 40e9, rel=2e-3)


def test_phases_of_a_hierarchy_add_up():
    """Of 16 nodes of eight: all bytes within the node, an eighth for each device between them."""
    within_s, between_s = 2 * 7 / 8 * 1e9 / 100e9, 2 * 15 / 16 * (1e9 / 8) / (40e9 / 8)
    found_s = scaling_fit.hierarchical_s(1e9, WITHOUT_LATENCY, 128)
    assert found_s == pytest.approx(within_s + between_s)
    assert scaling_fit.hierarchical_s(1e9, CLUSTER, 8) == scaling_fit.ring_s(1e9, CLUSTER, 8)


def test_steps_of_a_ring_grow_with_devices_and_those_of_a_tree_hardly():
    assert scaling_fit.ring_s(1, CLUSTER, 1024) == pytest.approx(
        8.4e-6 + 2 * 896 * 3.4e-6 + 2 * 127 * 9.6e-6, rel=1e-6
    )
    assert scaling_fit.tree_s(1, CLUSTER, 1024) == pytest.approx(
        4.4e-6 + 2 * 7 * 1.2e-6 + 2 * 7 * 8.5e-6, rel=1e-6
    )


def test_the_fastest_way_is_taken_of_those_there_are():
    small, large = 2**20, 2**30
    assert scaling_fit.all_reduce_s(small, CLUSTER, 1024) == scaling_fit.tree_s(
        small, CLUSTER, 1024
    )
    assert scaling_fit.all_reduce_s(large, CLUSTER, 16) == scaling_fit.ring_s(large, CLUSTER, 16)
    ring = dataclasses.replace(CLUSTER, algorithms=("ring",))
    assert scaling_fit.all_reduce_s(small, ring, 1024) == scaling_fit.ring_s(small, CLUSTER, 1024)


@pytest.mark.parametrize("cluster", [CLUSTER, SLOW])
@pytest.mark.parametrize("small_last", [False, True])
@pytest.mark.parametrize("overlaps", [False, True])
def test_no_step_is_faster_than_computing(cluster, overlaps, small_last):
    step = dataclasses.replace(STEP, overlaps=overlaps, small_last=small_last)
    assert scaling_fit.scale_step(step, cluster, 1).step_s == step.compute_s
    steps_s = [scaling_fit.scale_step(step, cluster, num).step_s for num in DEVICES]
    assert steps_s == sorted(steps_s)
    for num in DEVICES[1:]:
        found = scaling_fit.scale_step(step, cluster, num)
        assert step.compute_s < found.step_s <= step.compute_s + found.reduction_s * (1 + 1e-9)
        assert found.efficiency == pytest.approx(step.compute_s / found.step_s)


def test_what_hides_is_all_but_the_last_bucket():
    """Where each bucket is reduced before the next is ready."""
    last_bytes = scaling_fit.buckets(STEP)[-1]
    exposed_s = scaling_fit.scale_step(STEP, CLUSTER, 64).step_s - STEP.compute_s
    assert exposed_s == pytest.approx(scaling_fit.all_reduce_s(last_bytes, CLUSTER, 64))
    small = dataclasses.replace(STEP, small_last=True)
    exposed_s = scaling_fit.scale_step(small, CLUSTER, 64).step_s - STEP.compute_s
    assert exposed_s == pytest.approx(scaling_fit.all_reduce_s(2**20, CLUSTER, 64))


def test_where_reduction_bounds_a_step_buckets_wait_for_each_other():
    """From when the second is ready, for the small first one is done by then."""
    slower = dataclasses.replace(CLUSTER, between=Link(1e9, 9.6e-6, 8.5e-6))
    found = scaling_fit.scale_step(STEP, slower, 64)
    first, second, *_ = scaling_fit.buckets(STEP)
    ready_s = STEP.compute_s * (1 / 3 + 2 / 3 * (first + second) / STEP.gradient_bytes)
    others_s = found.reduction_s - scaling_fit.all_reduce_s(first, slower, 64)
    assert found.bound_by_reduction
    assert found.step_s == pytest.approx(ready_s + others_s)


def test_without_overlap_all_of_the_reduction_is_added():
    found = scaling_fit.scale_step(dataclasses.replace(STEP, overlaps=False), SLOW, 64)
    assert found.step_s == pytest.approx(STEP.compute_s + scaling_fit.all_reduce_s(100e6, SLOW, 64))
    assert found.step_s > scaling_fit.scale_step(STEP, SLOW, 64).step_s


@pytest.mark.parametrize("num_bytes", [1e3, 2**20, 100e6, 26 * 2**20, 4e9])
def test_buckets_hold_all_gradients(num_bytes):
    sizes = scaling_fit.buckets(TrainingStep(0.1, num_bytes))
    assert sum(sizes) == pytest.approx(num_bytes)
    assert min(sizes) > 0
    assert max(sizes) <= scaling_fit.BUCKET_BYTES


def test_a_model_that_is_replicated_in_each_step_hides_nothing():
    found_s = scaling_fit.replicated_step_s(STEP, WITHOUT_LATENCY.within)
    assert found_s == pytest.approx(0.1 + 2 * 100e6 / 100e9)
    assert found_s > scaling_fit.scale_step(STEP, WITHOUT_LATENCY, 8).step_s


def test_reduction_bounds_steps_shorter_than_the_least():
    least_s = scaling_fit.least_compute_s(STEP, SLOW, 64)
    longer, shorter = (
        scaling_fit.scale_step(dataclasses.replace(STEP, compute_s=least_s * by), SLOW, 64)
        for by in (1.01, 0.99)
    )
    assert shorter.bound_by_reduction
    assert not longer.bound_by_reduction


@pytest.mark.parametrize("change", [{"compute_s": 0.0}, {"gradient_bytes": 0.0}])
def test_a_step_of_nothing_is_refused(change):
    with pytest.raises(ValueError, match="above 0"):
        dataclasses.replace(STEP, **change)


def test_bytes_of_a_step_are_those_that_preflight_counts(monkeypatch, tmp_path):
    """Of two GPUs, each of which sends half of the parameters' bytes twice."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    model = runpy.run_path(str(ROOT / "benchmarks" / "scaling_model.py"))
    result = {
        "task": {"model": "net"}, "engine": "jax", "gpu": {"name": "a GPU"}, "num_gpus": 2,
        "model": {"num_parameters": 250, "units_per_sample": 16}, "versions": {},
        "communication": {"in_node_bytes": 600, "network_bytes": 400},
        "step": {"samples": 4, "bound_s": 0.5},
    }  # fmt: skip
    step = model["PreflightStep"].of_result(result)
    assert (step.gradient_bytes, step.units) == (1000, 64)
    for kept in model["STEPS"].values():  # a loss and its like are reduced too
        assert kept.gradient_bytes == pytest.approx(4 * kept.num_parameters, rel=0.05)


def test_the_docs_show_the_tables_that_the_command_prints(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))  # which the command puts the root into
    tables = runpy.run_path(str(ROOT / "benchmarks" / "scaling_model.py"))["TABLES"]
    page = (ROOT / "docs" / "scaling.md").read_text()
    missing = [title for title, make in tables.items() if make() not in page]
    assert not missing, "python benchmarks/scaling_model.py prints others than docs/scaling.md has"
