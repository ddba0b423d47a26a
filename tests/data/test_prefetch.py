"""Items fetched ahead in a thread."""

import collections
import gc
import importlib.util
import multiprocessing
import os
import re
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict, UserDict, defaultdict

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from accbench.data.loader import DataLoaderX, name_dead_workers
from accbench.data.nested import tensors_of
from accbench.data.prefetch import BackgroundGenerator, move
from accbench.data.samplers import DistributedSampler, IterationBasedBatchSampler
from tests.conftest import HANG_S, ROOT, python

Pair = collections.namedtuple("Pair", ["a", "b"])


def threads() -> int:
    return sum(thread.name == "prefetch" for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def _no_thread_left():
    before = threads()
    yield
    gc.collect()
    assert threads() == before


def numbers(count: int = 10) -> TensorDataset:
    return TensorDataset(torch.arange(count))


def values(batches) -> list[int]:
    return [value for (batch,) in batches for value in batch.tolist()]


def test_items_arrive_in_order():
    assert list(BackgroundGenerator(range(100), local_rank=0)) == list(range(100))
    assert list(BackgroundGenerator([], 0)) == []


def test_exception_reaches_the_consumer_once():
    def items():
        yield 1
        raise ZeroDivisionError("planted")

    stream = BackgroundGenerator(items(), 0)
    assert next(stream) == 1
    with pytest.raises(ZeroDivisionError, match="planted"):
        next(stream)
    with pytest.raises(StopIteration):
        next(stream)


def test_exception_while_moving_reaches_the_consumer():
    def fail(item):
        raise ZeroDivisionError("planted")

    with pytest.raises(ZeroDivisionError):
        list(BackgroundGenerator(range(3), 0, to_device=fail))


@pytest.mark.parametrize("max_prefetch", [1, 2, 6])
def test_never_further_ahead_than_allowed(max_prefetch):
    made = []

    def items():
        for index in range(50):
            made.append(index)
            yield index

    for taken, index in enumerate(BackgroundGenerator(items(), 0, max_prefetch)):
        if index % 10 == 0:
            time.sleep(0.05)
        assert len(made) <= taken + 1 + max_prefetch
    assert len(made) == 50
    with pytest.raises(ValueError, match="at least 1"):
        BackgroundGenerator([], 0, 0)


class Payload:
    pass


@pytest.mark.parametrize("how", ["close", "with", "del", "break"])
def test_leaving_early_ends_the_thread_and_frees_what_it_held(how):
    alive: list[weakref.ref] = []
    closed = []

    def items():
        try:
            while True:
                item = Payload()
                alive.append(weakref.ref(item))
                yield item
        finally:
            closed.append(True)

    stream = BackgroundGenerator(items(), 0)
    next(stream)
    if how == "with":
        with stream:
            pass
    elif how == "close":
        stream.close()
        stream.close()
    elif how == "break":
        for item in stream:
            del item
            break
    del stream
    gc.collect()
    assert closed == [True]
    assert not any(item() for item in alive)


def test_loop_that_ended_holds_nothing_of_who_ran_it():
    def run() -> weakref.ref:
        large = Payload()
        assert list(BackgroundGenerator(range(3), 0)) == [0, 1, 2]
        for _ in BackgroundGenerator(range(3), 0):
            pass
        return weakref.ref(large)

    gc.disable()
    try:
        assert run()() is None
    finally:
        gc.enable()


def test_closing_wakes_a_consumer_that_waits():
    release = threading.Event()

    def items():
        release.wait(HANG_S)
        yield 1

    stream = BackgroundGenerator(items(), 0)
    got: list[object] = []
    consumer = threading.Thread(target=lambda: got.extend(stream))
    consumer.start()
    time.sleep(0.1)
    threading.Timer(0.2, release.set).start()
    stream.close()
    consumer.join(HANG_S)
    assert not consumer.is_alive()


def test_any_nesting_is_moved():
    nested = {"a": (torch.ones(1), [torch.zeros(2), "text"]), "b": Pair(torch.ones(3), None)}
    moved = move(nested, torch.device("meta"))
    assert moved["a"][1][1] == "text"
    assert isinstance(moved["b"], Pair)
    assert [t.device.type for t in tensors_of(moved)] == ["meta"] * 3
    assert [tuple(t.shape) for t in tensors_of(moved)] == [(1,), (2,), (3,)]


def test_loader_has_length_and_epochs():
    data = numbers()
    sampler = DistributedSampler(data, 1, 0)
    loader = DataLoaderX(0, device="cpu", dataset=data, batch_size=4, sampler=sampler)
    assert isinstance(loader, DataLoader)
    assert len(loader) == 3
    orders = []
    for epoch in (0, 1, 0):
        loader.set_epoch(epoch)
        orders.append(values(loader))
    assert sorted(orders[0]) == list(range(10))
    assert orders[0] == orders[2] != orders[1]


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_can_be_left_and_begun_again(workers):
    loader = DataLoaderX(
        0, device="cpu", dataset=numbers(40), batch_size=4, num_workers=workers,
        persistent_workers=workers > 0, multiprocessing_context="fork" if workers else None,
    )  # fmt: skip
    for _ in range(2):
        first = iter(loader)
        assert next(first)[0].tolist() == [0, 1, 2, 3]
    assert values(loader) == list(range(40))


ON_XLA = """
import torch, torch_xla
from torch.utils.data import TensorDataset
from accbench.data.loader import DataLoaderX
data = TensorDataset(torch.arange(10))
loader = DataLoaderX(0, device=torch_xla.device(), dataset=data, batch_size=4)
batches = [batch for batch, in loader]
assert {batch.device.type for batch in batches} == {"xla"}
assert torch.cat([batch.cpu() for batch in batches]).tolist() == list(range(10))
"""


@pytest.mark.xla
def test_loader_moves_to_an_xla_device():
    if importlib.util.find_spec("torch_xla") is None:
        pytest.skip("no torch_xla")
    environment = {**os.environ, "PJRT_DEVICE": "CPU"}
    subprocess.run([sys.executable, "-c", ON_XLA], env=environment, cwd=ROOT, check=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_loader_copies_to_cuda_on_its_own_stream():
    data = TensorDataset(torch.arange(512 * 1024).float().view(512, 1024))
    expected = data.tensors[0].cuda().sum(1)
    loader = DataLoaderX(0, dataset=data, batch_size=8)
    sums = []
    for (batch,) in loader:
        assert batch.is_cuda
        sums.append((batch * 1.0).sum(1))
        del batch  # its memory may be used again, but not before the sum has read it
    assert torch.equal(torch.cat(sums), expected)


def test_what_batches_are_made_of_keeps_its_type():
    ones = torch.ones(2)
    with (
        BackgroundGenerator(
            [
                OrderedDict(b=ones, a=[ones]),
                defaultdict(list, a=ones),
                UserDict(a=ones),  # tokenizers give these
                torch.nn.utils.rnn.pack_sequence([ones, ones[:1]]),
            ],
            0,
            device="meta",
        ) as moved
    ):
        ordered, default, user, packed = moved
    assert (type(ordered), list(ordered)) == (OrderedDict, ["b", "a"])
    assert ordered["a"][0].is_meta
    assert default["none"] == []
    assert type(user) is UserDict
    assert user["a"].is_meta
    assert packed.data.is_meta
    assert not packed.batch_sizes.is_meta
    assert not ones.is_meta


@pytest.mark.parametrize("workers", [0, 2])
def test_state_counts_what_the_loop_got_not_what_was_fetched(workers):
    data = numbers(24)

    def loader(num_workers: int) -> DataLoaderX:
        sampler = DistributedSampler(data, 1, 0)
        return DataLoaderX(
            0, device="cpu", dataset=data, batch_size=4, sampler=sampler, num_workers=num_workers,
            multiprocessing_context="fork" if num_workers else None,
        )  # fmt: skip

    whole = values(loader(0))
    first = loader(workers)
    batches = iter(first)
    begun = [value for _ in range(2) for value in next(batches)[0].tolist()]
    time.sleep(0.2)
    resumed = loader(2 - workers)
    resumed.load_state_dict(first.state_dict())
    assert begun + values(resumed) == whole
    with pytest.raises(TypeError, match="no state"):
        DataLoaderX(0, device="cpu", dataset=data).state_dict()


def test_state_of_a_batch_sampler():
    def loader() -> DataLoaderX:
        data = numbers(10)
        inner = torch.utils.data.BatchSampler(DistributedSampler(data, 1, 0), 4, False)
        batches = IterationBasedBatchSampler(inner, 8)
        return DataLoaderX(0, device="cpu", dataset=data, batch_sampler=batches)

    whole = values(loader())
    first = loader()
    batches = iter(first)
    begun = [value for _ in range(4) for value in next(batches)[0].tolist()]
    first.set_epoch(3)  # which is for samplers that count no epochs themselves
    resumed = loader()
    resumed.load_state_dict(first.state_dict())
    assert begun + values(resumed) == whole


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("drop_last", [False, True])
def test_state_of_the_sampler_in_torchs_batch_sampler(workers, drop_last):
    data = numbers(45)

    def loader(world_size: int, rank: int, batch_size: int = 4) -> DataLoaderX:
        sampler = DistributedSampler(data, world_size, rank)
        batches = torch.utils.data.BatchSampler(sampler, batch_size, drop_last)
        return DataLoaderX(
            0, device="cpu", dataset=data, batch_sampler=batches, num_workers=workers
        )

    for num_before in (0, 1, 3, len(loader(2, 1))):
        whole, first = loader(2, 1), loader(2, 1)
        for one in (whole, first):
            one.set_epoch(2)
        batches = iter(first)
        begun = [value for _ in range(num_before) for value in next(batches)[0].tolist()]
        state = first.state_dict()
        batches.close()
        resumed = loader(2, 1)
        resumed.set_epoch(2)
        resumed.load_state_dict(state)
        assert begun + values(resumed) == values(whole)
        resumed.set_epoch(3)
        assert resumed.state_dict()["stages"] == [[2, 0]]  # before anything of it was read
        if not drop_last:
            read = min(2 * 4 * num_before, 45)
            alone = loader(1, 0, batch_size=5)
            alone.load_state_dict(state)
            assert len(values(alone)) == 45 - read


def test_two_passes_at_once_are_two_passes():
    data = numbers(12)
    sampler = DistributedSampler(data, 1, 0)
    loader = DataLoaderX(0, device="cpu", dataset=data, batch_size=4, sampler=sampler)
    pairs = list(zip(loader, loader, strict=True))
    assert len(pairs) == 3
    assert all(torch.equal(first[0], second[0]) for first, second in pairs)
    earlier, later = iter(loader), iter(loader)
    for batches in (earlier, earlier, later):
        next(batches)
    assert loader.state_dict()["stages"] == [[1, 4]]  # of the pass that began last
    earlier.close()
    later.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_looking_at_the_next_batch_ends_no_loop(workers):
    """Also where the worker processes are kept, which torch takes from the first of two loops."""
    data = numbers(40)
    loader = DataLoaderX(
        0, device="cpu", dataset=data, batch_size=2, sampler=DistributedSampler(data, 1, 0, False),
        num_workers=workers, persistent_workers=workers > 0, max_prefetch=2,
        multiprocessing_context="fork" if workers else None,
    )  # fmt: skip
    found = []
    for (batch,) in loader:
        found += batch.tolist()
        if len(found) in (2, 6):
            assert next(iter(loader))[0].tolist() == [0, 1]
            assert loader.state_dict()["stages"] == [[1, len(found)]]  # of the loop
    assert found == list(range(40))


def test_loader_that_was_left_goes_with_its_thread_and_processes():
    loader = DataLoaderX(
        0, device="cpu", dataset=numbers(40), batch_size=2, num_workers=1, persistent_workers=True,
        multiprocessing_context="fork", max_prefetch=2,
    )  # fmt: skip

    def processes() -> int:
        return sum(p.name() == "pt_data_worker" for p in psutil.Process().children())

    before = threads()
    for _ in loader:
        next(iter(loader))
        assert processes() == 1  # those of the look are gone
        break
    assert threads() == before
    next(iter(loader))
    assert processes() == 1  # kept, and used again
    left = iter(loader)
    next(left)
    alive = weakref.ref(loader)
    del loader
    assert alive() is None
    assert values(left) == list(range(2, 40))
    del left
    assert processes() == 0


def test_what_has_no_state_says_what_has():
    data = numbers(8)

    class Reversed(torch.utils.data.BatchSampler):
        def __iter__(self):
            return iter(list(super().__iter__())[::-1])

    ours, torchs = DistributedSampler(data, 1, 0), torch.utils.data.DistributedSampler(data, 1, 0)
    for batches in (
        torch.utils.data.BatchSampler(torchs, 4, False),
        Reversed(ours, 4, False),
        [[0, 1], [2, 3]],
    ):
        with pytest.raises(TypeError, match=r"has no state; take accbench\.data\.samplers"):
            DataLoaderX(0, device="cpu", dataset=data, batch_sampler=batches).state_dict()


# In a process of their own: torch raises such an error in the main thread wherever
# that happens to be, which may be inside pytest.
KILLED_WORKER = """
import os, signal, torch
from accbench.data.loader import DataLoaderX
class Dying(torch.utils.data.Dataset):
    def __len__(self):
        return 100
    def __getitem__(self, index):
        if index == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor(index)
list(DataLoaderX(0, device="cpu", dataset=Dying(), batch_size=2, num_workers=1))
"""


def test_killed_worker_process_is_an_error_not_a_hang(tmp_path):
    script = tmp_path / "killed_worker.py"
    script.write_text(KILLED_WORKER)
    done = python("-m", "tests.started", "{}", script)
    assert done.returncode == 1
    assert re.search(r"RuntimeError: DataLoader worker .*(killed|exited)", done.stderr)


class _LosesItsWorker:
    """Like torch's, where a worker process dies while it hands over a batch."""

    def __init__(self, worker):
        self._workers = [worker]

    def __iter__(self):
        return self

    def __next__(self):
        raise EOFError


def test_worker_that_hands_over_no_more_is_waited_for_until_it_is_gone():
    # Or torch's own error would come into the main thread while ours is printed.
    dying = multiprocessing.Process(target=time.sleep, args=(0.5,))
    dying.start()
    with pytest.raises(RuntimeError, match=rf"\(process {dying.pid}\) exited with 0 while it"):
        next(name_dead_workers(_LosesItsWorker(dying)))
    assert not dying.is_alive()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_lost_connection_of_a_data_set_is_not_called_a_dead_worker(num_workers):
    class Remote(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            raise ConnectionError("no route to the bucket")

    loader = DataLoaderX(0, device="cpu", dataset=Remote(), num_workers=num_workers)
    with pytest.raises(ConnectionError, match="no route to the bucket"):
        next(iter(loader))


# Each case in a process that is forked when torch is there; its errors go to FOLDER/CASE.
FULL_SHM = """
import os, signal, sys, time
import torch
from accbench.data.loader import DataLoaderX


class BusErrors(torch.utils.data.Dataset):  # as torch 2.8 has them in full shared memory
    def __len__(self):
        return 64

    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGBUS)


def in_the_loop():
    data = torch.utils.data.TensorDataset(torch.zeros(64, 256, 256))
    list(DataLoaderX(0, device="cpu", dataset=data, batch_size=16, num_workers=1))


def elsewhere():
    loader = DataLoaderX(0, device="cpu", dataset=BusErrors(), batch_size=16, num_workers=1)
    batches = iter(loader)
    time.sleep(HANG_S)


statuses = []
for case in (in_the_loop, elsewhere):
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(f"{sys.argv[1]}/{case.__name__}", os.O_WRONLY | os.O_CREAT), 2)
        case()
        sys.exit(0)
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print(statuses)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")
def test_full_shared_memory_is_an_error_wherever_the_main_thread_is(tmp_path):
    mount = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"']
    if subprocess.run([*mount, "sh", "true"], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    done = subprocess.run(
        [*mount, "sh", sys.executable, "-c", FULL_SHM.replace("HANG_S", str(HANG_S)), tmp_path],
        cwd=ROOT, capture_output=True, text=True, timeout=HANG_S,
    )  # fmt: skip
    assert done.stdout.strip() == "[1, 1]", done.stderr
    told = "RequestError: the loading processes hand batches over in shared memory"
    for case in ("in_the_loop", "elsewhere"):
        assert told in (tmp_path / case).read_text()
