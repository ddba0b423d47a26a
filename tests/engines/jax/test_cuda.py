"""Engine jax on CUDA, as far as it can be seen without a GPU: devices and drivers are made up."""

import contextlib
import logging
import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from accbench.config import TaskConfig
from accbench.distributed.process_group import Topology
from accbench.engines.jax import runtime
from accbench.errors import RequestError
from accbench.pjrt import nvidia
from accbench.report import summary, table

jax = pytest.importorskip("jax")

GPU = SimpleNamespace(platform="gpu")


@pytest.fixture
def one_gpu(monkeypatch):
    gpu = nvidia.NvidiaGpu("NVIDIA X", 2**36, "9.0")
    monkeypatch.setattr(nvidia, "driver", lambda: nvidia.Driver((gpu,), "13.0"))
    monkeypatch.setattr(runtime.importlib.util, "find_spec", lambda name: name)


def test_workers_have_a_gpu_each(one_gpu):
    assert runtime.device_problem(TaskConfig(device="cuda")) is None
    told = runtime.device_problem(TaskConfig(device="cuda", nproc_per_node=2))
    assert told == "--nproc_per_node 2 is more than the 1 CUDA devices here (NVIDIA X)"


def test_a_machine_without_a_driver_does_not_train_on_cuda(one_gpu, monkeypatch):
    monkeypatch.setattr(nvidia, "driver", lambda: nvidia.Driver(problem="no driver"))
    told = runtime.device_problem(TaskConfig(device="cuda"))
    assert told == "--device cuda: no driver; use --device cpu to train on the CPU"


def test_workers_are_told_where_libdevice_is(monkeypatch, tmp_path):
    from accbench.engines.jax.engine import Engine

    monkeypatch.setattr(nvidia, "toolkit", lambda plugin: tmp_path)
    assert Engine.worker_env(TaskConfig(device="cuda"), 0)["CUDA_ROOT"] == str(tmp_path)
    assert "CUDA_ROOT" not in Engine.worker_env(TaskConfig(device="cpu", threads=1), 0)


@pytest.fixture
def tf32_of_torch():
    products, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(products)
    torch.backends.cudnn.set_flags(_allow_tf32=cudnn)


@pytest.mark.parametrize("tf32", [True, False])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_torch_and_jax_have_one_policy_of_tf32(monkeypatch, tf32_of_torch, tf32, is_frozen):
    """And products of 16 bits are not widened, which moves more bytes."""
    from accbench.engines.ddp import engine as ddp
    from accbench.engines.jax import lowering
    from accbench.engines.jax.engine import Engine

    # As the import of torch.testing._internal does, which some libraries bring.
    monkeypatch.setattr(torch.backends, "__allow_nonbracketed_mutation_flag", not is_frozen)
    ddp.allow_tf32(tf32)
    assert torch.backends.cuda.matmul.allow_tf32 is tf32
    assert torch.backends.cudnn.allow_tf32 is tf32
    rules = runtime.lowering_rules("cuda", Engine.Options(), tf32)
    for dtype, is_exact in ((torch.float32, not tf32), (torch.bfloat16, False)):
        with mock.patch.dict(os.environ):  # torch's tracing leaves a folder's name there
            graph = make_fx(lambda a: a @ a, tracing_mode="fake")(torch.ones(2, 2).to(dtype))
        array = jax.numpy.ones((2, 2), str(dtype).removeprefix("torch."))
        lowered = jax.jit(lambda a, g=graph: lowering.run_graph(g, [a], rules=rules)).lower(array)
        assert ("HIGHEST" in lowered.as_text()) is is_exact


def test_a_steps_scratch_is_known_before_it_runs():
    array = jax.numpy.ones((64, 64), "float32")
    for donated, num_bytes in (((), array.nbytes), ((0,), 0)):
        step = jax.jit(lambda a: a + 1, donate_argnums=donated).lower(array).compile()
        assert runtime.scratch_bytes(step) == num_bytes


def _fail_as_jax_does(*_: Any) -> list[Any]:
    try:
        raise RuntimeError("operation cuInit(0) failed:\nUnknown CUDA error 303")
    except RuntimeError:
        logging.getLogger("jax._src.xla_bridge").exception(
            "Exception when calling jax_plugins.xla_cuda13.initialize()"
        )
    return [SimpleNamespace(platform="cpu")]


def test_why_jax_found_no_gpu_is_in_the_one_line(monkeypatch, caplog):
    from accbench.engines.jax import data_mesh

    monkeypatch.setattr(jax, "local_devices", _fail_as_jax_does)
    with pytest.raises(RequestError) as caught:
        data_mesh.check_device("cuda")
    told = str(caught.value)
    assert told.startswith("--device cuda, but JAX came up on cpu: Exception when calling")
    assert "operation cuInit(0) failed: Unknown CUDA error 303" in told
    assert "\n" not in told
    assert caplog.text == ""  # nothing of it is told twice


def test_a_client_that_does_not_come_up_is_told_in_one_line(monkeypatch):
    from accbench.engines.jax import data_mesh

    def fail() -> None:
        raise RuntimeError("Unable to initialize backend 'cuda':\nno memory")

    monkeypatch.setattr(jax, "local_devices", fail)
    with pytest.raises(RequestError, match="--device cuda, .* backend 'cuda': no memory"):
        data_mesh.check_device("cuda")


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool,
              torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2],
)  # fmt: skip
def test_batches_go_to_a_gpu_without_dlpack(monkeypatch, dtype):
    """JAX refuses to copy pinned memory that comes by DLPack ("Memory kind mismatch").

    No GPU is here, and so no pinned memory: what is tested is that DLPack has no part in it."""
    from accbench.engines.jax import arrays

    put = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda array, device: put(array))
    with monkeypatch.context() as patched:
        patched.setattr(jax.dlpack, "from_dlpack", None)
        sources = [torch.arange(6.0).view(2, 3).to(dtype).t(), torch.tensor(3.0).to(dtype)]
        sent = [arrays.from_torch(source, GPU) for source in sources]
    with jax.enable_x64(True):
        for source, array in zip(sources, sent, strict=True):
            back = arrays.to_torch(array)
            wide = torch.complex64 if dtype.is_complex else torch.float64
            assert torch.equal(back.to(wide), source.to(wide))
            assert back.dtype == (torch.int32 if dtype is torch.int64 else dtype)


def test_capturing_does_not_start_torchs_cuda(monkeypatch):
    from accbench.engines.jax import capture, lowering

    def start() -> None:
        raise AssertionError("torch's CUDA was started")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for module in (torch.cuda, torch.cuda.random):
        monkeypatch.setattr(module, "_lazy_init", start)
    model, batch = nn.Sequential(nn.Linear(8, 4), nn.Dropout()), torch.randn(3, 8)
    with pytest.raises(AssertionError, match="was started"):
        torch.cuda.get_rng_state()
    saved = torch.get_rng_state()
    with mock.patch.dict(os.environ):  # torch's tracing leaves a folder's name there
        found = capture.capture(
            model, lambda net, x: net(x).mean(), batch, contextlib.nullcontext,
            lowering.decompositions(),
        )  # fmt: skip
    assert found.trained == [0, 1]
    assert torch.equal(torch.get_rng_state(), saved)


def test_the_peak_after_the_warm_up_is_told_beside_the_peak_with_it(monkeypatch):
    """A device that is made up forgets its peak when it is asked to."""
    from accbench.engines.ddp.engine import Engine
    from accbench.training import step_timer
    from tests.report import fakes

    peaks = {"now": 900 * 2**20}
    monkeypatch.setattr(Engine, "peak_memory_bytes", lambda self: peaks["now"])
    monkeypatch.setattr(Engine, "reset_peak_memory", lambda self: peaks.update(now=500 * 2**20))
    task = TaskConfig(device="cpu", batch_size=2, warmup_steps=1, log_interval=1, amp_level="O0")
    windows: list[Any] = []
    listener = SimpleNamespace(step=lambda number: None, window=windows.append)
    engine = Engine(task, Engine.Options(), Topology())
    timer = step_timer.StepTimer(engine, 0.0, listener)
    timer.start(0)
    for _ in range(3):
        timer.step_done(torch.tensor(1.0))
    assert [window.peak_memory_bytes // 2**20 for window in windows] == [900, 500, 500]
    run = [fakes.header("ddp"), *windows]
    summed = summary.summarize_records("a", run)
    assert (summed.peak_memory_bytes, summed.warmup_peak_memory_bytes) == (500 * 2**20, 900 * 2**20)
    shown = table.render([summed], "md")
    assert "| warm-up peak MiB |" in shown
    assert "| 900 |" in shown
    assert "| 500 |" in shown
