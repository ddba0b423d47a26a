"""Results from Dask tasks: all arrive, whole, below the folder and nowhere else."""

import os
from pathlib import Path

import pytest
from distributed import Event, Future

from accbench.launchers.dask import DaskResultsHandler, collecting, run
from tests.launchers.dask import ranks
from tests.launchers.dask.clusters import cluster

NUM_BYTES = 100_000_000


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    with cluster(tmp_path_factory.mktemp("dask")) as made:
        yield made


def files_of(folder: Path) -> dict[str, str]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_text() for path in found}


def task(client, *call, **options) -> Future:
    return client.submit(*call, pure=False, **options)


def test_results_of_all_ranks_are_written(client, tmp_path):
    handler = DaskResultsHandler("../key/that goes up")
    handler.process_results(tmp_path / "made", run(client, ranks.submit_many, handler, 20))
    expected = {f"rank{r}/{n}.txt": str(n) for r in range(2) for n in range(20)}
    assert files_of(tmp_path / "made") == expected


def test_what_came_before_anybody_listened_is_written(client, tmp_path):
    handler = DaskResultsHandler()
    futures = run(client, ranks.submit_many, handler, 300)
    client.gather(futures)
    handler.process_results(tmp_path, futures)
    assert len(files_of(tmp_path)) == 600


@pytest.mark.soak
def test_ten_thousand_and_a_checkpoint_arrive_while_a_worker_is_killed(tmp_path):
    with cluster(tmp_path / "dask") as own:
        steady, other = sorted(own.scheduler_info()["workers"])
        handler = DaskResultsHandler()
        futures = [
            task(own, ranks.submit_much, handler, 10_000, NUM_BYTES, workers=[steady]),
            task(
                own, ranks.submit_and_be_killed, handler, 50, tmp_path / "killed",
                workers=[other], allow_other_workers=True,
            ),
        ]  # fmt: skip
        handler.process_results(tmp_path / "results", futures)
        assert own.scheduler_info()["workers"].keys() != {steady, other}
    checkpoint = tmp_path / "results" / "steady" / "checkpoint"
    assert checkpoint.read_bytes() == b"accbench" * (NUM_BYTES // 8)
    checkpoint.unlink()
    expected = {f"steady/{n}.txt": str(n) for n in range(10_000)}
    expected |= {f"killed/{n}.txt": str(n) for n in range(50)} | {"killed/again.txt": "again"}
    assert files_of(tmp_path / "results") == expected


@pytest.mark.parametrize("path", ["../outside", "/outside", "a/../../outside", "", "."])
def test_paths_that_lead_out_are_refused_where_they_are_submitted(client, tmp_path, path):
    folder = tmp_path / "results"
    handler = DaskResultsHandler()
    future = task(client, ranks.submit, handler, path, b"")
    with pytest.raises(ValueError, match="is empty or absolute, or goes up"):
        handler.process_results(folder, [future])
    assert os.listdir(tmp_path) == ["results"]
    assert not files_of(folder)


@pytest.mark.parametrize("path", ["../outside", "{outside}/file", "link/file", "pipe/file"])
def test_paths_that_lead_out_are_refused_where_they_arrive(client, tmp_path, path):
    """From a rank that does not keep to the rules; what else it sends is written."""
    folder, outside = tmp_path / "results", tmp_path / "outside"
    for made in (folder, outside):
        made.mkdir()
    (folder / "link").symlink_to(outside)
    os.mkfifo(folder / "pipe")
    handler = DaskResultsHandler()
    path = path.format(outside=outside)
    with pytest.raises(ValueError, match="not written: "):
        handler.process_results(folder, [task(client, ranks.submit_hostile, handler, path)])
    assert not os.listdir(outside)
    assert (folder / "harmless").read_text() == "text"
    assert sorted(os.listdir(folder)) == ["harmless", "link", "pipe"]


def test_a_link_is_replaced_and_not_followed(client, tmp_path):
    folder, outside = tmp_path / "results", tmp_path / "outside"
    folder.mkdir()
    outside.write_text("as before")
    (folder / "file").symlink_to(outside)
    handler = DaskResultsHandler()
    handler.process_results(folder, [task(client, ranks.submit, handler, "file", b"new")])
    assert outside.read_text() == "as before"
    assert (folder / "file").read_text() == "new"


def test_errors_come_with_the_results_before_them(client, tmp_path):
    handler = DaskResultsHandler()
    with pytest.raises(KeyError, match="planted fault"):
        handler.process_results(tmp_path, [task(client, ranks.submit_then_raise, handler)])
    assert files_of(tmp_path) == {"before": "text"}


def test_errors_are_logged_where_they_are_not_to_be_raised(client, tmp_path, caplog):
    handler = DaskResultsHandler()
    futures = [
        task(client, ranks.submit_then_raise, handler),
        task(client, ranks.submit, handler, "other", b"text"),
    ]
    handler.process_results(tmp_path, futures, raise_errors=False)
    assert files_of(tmp_path) == {"before": "text", "other": "text"}
    assert "planted fault" in caplog.text


def test_results_that_the_scheduler_has_dropped_are_an_error(client, tmp_path):
    """As one does that is set to keep few events."""
    handler = DaskResultsHandler()
    future = task(client, ranks.submit_before_and_after, handler, handler.key)

    def drop(dask_scheduler) -> int:
        topics = dask_scheduler._broker._topics
        (topic,) = [topic for name, topic in topics.items() if f"{handler.key}/" in name]
        assert topic.count == 5
        topic.truncate()

    while not dropped(client, drop):
        pass
    Event(handler.key, client=client).set()
    with pytest.raises(collecting.ResultsLostError, match="results 0 to 4 of tcp://.* are lost"):
        handler.process_results(tmp_path, [future])


def dropped(client, drop) -> bool:
    try:
        client.run_on_scheduler(drop)
    except (AssertionError, ValueError):  # not yet there
        return False
    return True


def test_results_come_from_tasks_alone():
    with pytest.raises(RuntimeError, match="a task on a Dask worker"):
        DaskResultsHandler().submit_result("path", "text")
