"""`run`: a function on every Dask worker of a real cluster, as one process group."""

import os
import subprocess
import sys
import threading

import psutil
import pytest
from distributed import Client, LocalCluster

from accbench.launchers.dask import rank_assignment, run
from tests.conftest import ROOT, leave_to_fixture
from tests.launchers.dask import ranks
from tests.launchers.dask.clusters import cluster


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    with cluster(tmp_path_factory.mktemp("dask")) as made:
        yield made


def test_every_worker_is_one_rank_and_futures_are_in_their_order(client):
    """And arguments are the function's, also by names that Dask's own submit has."""
    futures = run(client, ranks.place, 1, client.submit(sum, [1, 1]), key=2, workers=3)
    results = client.gather(futures)
    assert [result["rank"] for result in results] == [0, 1]
    assert [result["total"] for result in results] == [3.0, 3.0]
    assert {r["address"] for r in results} == set(client.scheduler_info()["workers"])
    assert all(r["args"] == (1, 2) and r["kwargs"] == {"key": 2, "workers": 3} for r in results)


def test_ranks_of_a_host_are_counted_and_told(client):
    results = client.gather(run(client, ranks.place, pass_local_rank=True))
    assert [result["kwargs"] for result in results] == [{"local_rank": 0}, {"local_rank": 1}]
    assert [r["environment"]["LOCAL_RANK"] for r in results] == ["0", "1"]
    assert {r["environment"]["WORLD_SIZE"] for r in results} == {"2"}
    assert len({r["environment"]["MASTER_PORT"] for r in results}) == 1


def test_environment_is_as_before(client):
    before = client.run(ranks.environment)
    client.gather(run(client, ranks.place))
    assert client.run(ranks.environment) == before


def test_the_same_call_twice_runs_twice(client):
    """Also at one time, where every worker could run both at once."""
    first, second = run(client, ranks.token), run(client, ranks.token)
    assert len({*client.gather(first), *client.gather(second)}) == 4


def test_workers_are_known_while_the_client_asks_for_none(client):
    """As it does every few seconds, by itself; its answer has no workers."""
    stopped = threading.Event()

    def ask_for_none() -> None:
        while not stopped.is_set():
            client.sync(client._update_scheduler_info, n_workers=0)

    thread = threading.Thread(target=ask_for_none)
    thread.start()
    try:
        for _ in range(5):
            assert [r["rank"] for r in client.gather(run(client, ranks.place))] == [0, 1]
    finally:
        stopped.set()
        thread.join()


def test_nothing_listens_beyond_the_workers_own_address(client):
    assert client.gather(run(client, ranks.listens_at)) == [{"127.0.0.1"}, {"127.0.0.1"}]


def test_loaders_have_processes(client):
    """Which one rank starts anew, with torch to import, and the other forks."""
    numbers = list(range(8))
    assert client.gather(run(client, ranks.load, ["spawn", "fork"])) == [(numbers, True)] * 2


@pytest.mark.parametrize("fault", [ranks.rank1_raises, ranks.rank1_raises_and_cannot_leave])
def test_what_a_rank_raises_is_what_its_future_raises(client, fault):
    futures = run(client, fault)
    error = futures[1].exception()
    client.run(ranks.can_leave_again)
    assert isinstance(error, KeyError)
    assert error.args == ("planted fault",)
    if sys.version_info >= (3, 11):
        assert "rank 1's Dask worker tcp://127.0.0.1:" in error.__notes__[0]
    assert isinstance(futures[0].exception(), RuntimeError)
    assert [r["rank"] for r in client.gather(run(client, ranks.place))] == [0, 1]


def test_a_group_that_a_worker_could_not_join_keeps_nobody_apart(client):
    first, *_ = client.scheduler_info()["workers"]
    client.run(ranks.cannot_join, workers=[first])
    assert [r["rank"] for r in client.gather(run(client, ranks.place))] == [0, 1]


def test_ranks_that_wait_for_a_busy_worker_can_be_cancelled(client, tmp_path):
    address, release = sorted(client.scheduler_info()["workers"])[1], tmp_path / "release"
    hold = [client.submit(ranks.wait_for, release, workers=[address], pure=False) for _ in range(2)]
    futures = run(client, ranks.place)
    client.cancel(futures)
    release.touch()
    client.gather(hold)
    assert [r["rank"] for r in client.gather(run(client, ranks.place))] == [0, 1]


def test_a_killed_worker_is_named_and_the_cluster_is_used_again(client):
    futures = run(client, ranks.rank1_is_killed)
    for future in futures:
        error = future.exception(timeout=60) if future.status == "error" else None
        with pytest.raises(Exception, match="rank 1's Dask worker tcp://127.0.0.1:.* left"):
            raise error or future.result(timeout=60)
    client.wait_for_workers(2, timeout=60)
    leave_to_fixture(psutil.Process(pid) for pid in client.run(os.getpid).values())
    assert [r["rank"] for r in client.gather(run(client, ranks.place))] == [0, 1]


def test_workers_in_one_process_are_refused():
    with (
        LocalCluster(n_workers=2, processes=False, dashboard_address="127.0.0.1:0") as made,
        Client(made, set_as_default=False) as own,
        pytest.raises(ValueError, match="start the cluster with processes"),
    ):
        run(own, ranks.place)


@pytest.mark.parametrize(
    ("visible", "index"),
    [
        ([None, None], [0, 1]),  # Dask workers, which see all devices
        (["0,1", "0,1"], [0, 1]),
        (["0,1", "1,0"], [0, 0]),  # dask-cuda
        (["2", "3"], [0, 0]),
        (["GPU-a,GPU-b", "GPU-b,GPU-a"], [0, 0]),
    ],
)
def test_every_rank_has_a_device_of_its_own(visible, index):
    found = [
        rank_assignment.device_index(local_rank, visible, len(names.split(",")) if names else 2)
        for local_rank, names in enumerate(visible)
    ]
    assert found == index


def test_more_ranks_than_devices_are_refused():
    with pytest.raises(RuntimeError, match="2 ranks and 1 CUDA devices"):
        rank_assignment.device_index(1, [None, None], 1)


def test_accbench_is_used_without_dask():
    """Which is an extra: nothing of it is imported before it is asked for."""
    code = "import accbench.launchers.dask, sys; sys.exit('distributed' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ, check=True)
