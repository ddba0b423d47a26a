"""Training compiled by XLA, through torch_xla: `--compiler-opt`.

One step is traced into one graph that ends at `torch_xla.sync()`. Where the
device has collectives between processes, the gradients' all-reduce is part of
that graph. XLA on the CPU has none, and its `all_reduce` does nothing without
saying so; there the step is cut in two, and gloo averages the gradients on the
host in between.
"""

import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accbench import engines
from accbench.config import TaskConfig
from accbench.data import moving, nested, prefetch
from accbench.data.prefetch import BackgroundGenerator
from accbench.distributed import used_parameters
from accbench.distributed.process_group import Topology
from accbench.engines.common import model_state, tied_parameters, training_state
from accbench.engines.common.training_state import Tensors, TrainingState
from accbench.engines.ddp.engine import peak_resident_bytes
from accbench.engines.loops import LoopEngine
from accbench.engines.xla import (
    autocast,
    barriers,
    call_checks,
    cuda,
    device_module,
    host_to_device,
    index_watch,
    inference_mode,
    kernels,
    lazy_import,
    metrics,
    profiling,
    reduction,
    runtime,
    step_state,
    unsupported,
)
from accbench.engines.xla.kernels import batchnorm, recurrent
from accbench.engines.xla.options import XlaOptions
from accbench.engines.xla.precision import XlaPrecision
from accbench.errors import RequestError
from accbench.pjrt import devices, nvidia, xla_flags
from accbench.recording import provenance
from accbench.recording.terminal import log
from accbench.system import extras


class Engine(LoopEngine):
    """torch_xla: one graph a step, a syncfree optimizer, gradients averaged in the graph."""

    Options = XlaOptions
    compiler = "xla"
    traces_device = True
    step_tracer = "accbench.preflight.tracing.xla"
    recompute_barrier = staticmethod(barriers.recompute_barrier)

    @classmethod
    def find_device(cls, requested: str) -> str:
        return devices.find(requested)

    @classmethod
    def unavailable_reason(cls, task: TaskConfig) -> str | None:
        if importlib.util.find_spec("torch_xla") is None:
            return f"--compiler-opt (--engine xla) needs {extras.not_installed('torch_xla', 'xla')}"
        options = task.options.get("xla", cls.Options())
        try:
            xla_flags.parse(options.flags)
        except RequestError as error:
            return f"--xla.flags: {error}"
        if options.replay == "on" and task.device == "cpu" and task.nproc_per_node > 1:
            return (
                "--xla.replay on needs gradients that are averaged in the graph, and workers on "
                "a CPU average on the host; leave it off, or use --nproc_per_node 1"
            )
        return cuda.problem(task) if task.device == "cuda" else None

    @classmethod
    def other_python(cls) -> Path | None:
        return extras.python_with_torch_xla()

    @classmethod
    def worker_env(cls, task: TaskConfig, local_rank: int) -> dict[str, str]:
        env = {
            "PJRT_DEVICE": runtime.PJRT_DEVICES[task.device],
            # Where something imports inductor, it starts a process a core to compile in;
            # they would take the cores from the first steps for nothing.
            "TORCH_WARM_POOL": "0",
        }
        if task.device == "cpu" and task.threads:
            # XLA sizes its thread pool by this name or by the machine's cores.
            env["NPROC"] = str(task.threads)
        return env

    def __init__(self, task: TaskConfig, options: XlaOptions, topology: Topology) -> None:
        super().__init__(task, options, topology)
        unknown = xla_flags.unknown_in_table(nvidia.find_plugin()) if task.device == "cuda" else ()
        if unknown and topology.rank == 0:
            log.warning(xla_flags.left_out_notice(unknown))
        flags = xla_flags.merge(task.device, options.flags, unknown)
        if flags:  # XLA reads them once, when a device is first used
            os.environ["XLA_FLAGS"] = flags
        self.xla = lazy_import.torch_xla()
        import torch_xla.core.xla_model as xm

        self.xm = xm
        is_float32 = task.amp_level == "O0" and task.script is None
        if task.device == "cuda" and task.tf32 == "off" and is_float32:
            # Under autocast it would widen products of 16 bits too, and move more bytes.
            self.xla.backends.set_mat_mul_precision("highest")
        device_module.register()
        self._cache = runtime.enable_compile_cache(task.device, topology.rank, options)
        self.device = self._open_device()
        xm.set_replication(self.device, xm.get_xla_supported_devices())
        in_graph = task.device != "cpu"
        mib = options.bucket_mib if in_graph else options.host_bucket_mib
        self.strategy: reduction.XlaDataParallel = reduction.XlaDataParallel(
            topology, self.device, in_graph, mib * 2**20
        )
        self._fused = options.lean == "on" or (options.lean == "auto" and task.device != "cpu")
        self.precision: XlaPrecision = XlaPrecision(task, self.device, self._fused)
        kernels.register_all(self._fused)
        self._replay = self._start_replay()
        # A recorded graph reads and writes the tensors that it was recorded with.
        self._fresh_step_tensors = self._fused and self._replay is None
        if self.precision.scaler is not None:
            self.precision.scaler.fresh_step_tensors = self._fresh_step_tensors
        self._num_steps = 0
        self._shared_parameters = set[nn.Parameter]()  # of a loop of a user's own
        self._index_watch = index_watch.IndexWatch()
        self._left_compiler: list[str] = []

    def _open_device(self) -> torch.device:
        return runtime.open_device(self.task.device, self.topology)

    def _start_replay(self) -> Any | None:
        proven = self.task.device == "cpu" and self.topology.world_size == 1
        if self.options.replay == "off" or (self.options.replay == "auto" and not proven):
            return None
        from accbench.engines.xla.replay import StepReplay

        return StepReplay(self.device, self.precision.scaler, log.info)

    @property
    def compile_cache(self) -> str:
        return self._cache

    @property
    def device_name(self) -> str:
        if self.task.device == "cpu":
            return provenance.cpu_name()
        return str(self.xm.xla_device_kind(self.device))

    def check_model(self, net: nn.Module) -> None:
        """See the base class."""
        super().check_model(net)
        unsupported.refuse(net)

    def prepare(self, model: nn.Module) -> nn.Module:
        batchnorm.average_cumulatively(model)
        recurrent.use_scan(model)
        ties, host_parameters = tied_parameters.find_ties(model), dict(model.named_parameters())
        model = model.to(self.device)
        tied_parameters.restore_ties(ties)  # XLA's tensors are new ones, one for each slot
        for name, parameter in model.named_parameters():
            tied_parameters.copy_attributes_and_hooks(host_parameters[name], parameter)
        self._check_calls(model)
        return model

    def _check_calls(self, model: nn.Module) -> None:
        call_checks.check_calls(model)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        from accbench.engines.xla import sync_free, task_optimizer

        optimizer: torch.optim.Optimizer = task_optimizer.build(
            self.task, model, self._send, self._fused, self._fresh_step_tensors
        )
        if isinstance(optimizer, sync_free.SharedStepCounts) and self._replay is not None:
            optimizer.is_recorded = lambda: self._replay.recording  # type: ignore[method-assign, union-attr]
            self._replay.correct_state = lambda: optimizer.split_counts(
                optimizer.stepped, lambda count: self._send(count.cpu())
            )
        self._note_parameter_order(model)
        self._give_up_replay_for_extra_state(model)
        self.precision.create_scaler_state()
        self.xla.sync()
        return optimizer

    def _send(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor from the host to the device, with nothing left to compute."""
        sent: torch.Tensor = self.to_device((tensor,))[0]
        return sent

    def _give_up_replay_for_extra_state(self, model: nn.Module) -> None:
        name = model_state.first_with_extra_state(model)
        if self._replay is not None and name is not None:
            # A forward pass may change it, which a recorded step would not run.
            self._replay.give_up(f"{name or 'the model'} has extra state (get_extra_state)")

    def _note_parameter_order(self, model: nn.Module) -> None:
        # In the order of the model's modules, whatever groups they are in.
        self._index_of_param = {parameter: i for i, parameter in enumerate(model.parameters())}

    def adopt_optimizer(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        from accbench.engines.xla import optimizer_conversion

        self._shared_parameters = {*model.parameters()}
        optimizer_conversion.convert(optimizer, self._send, self._fused)
        self.precision.create_scaler_state()
        self.xla.sync()

    def load_training_state(
        self, net: nn.Module, optimizer: torch.optim.Optimizer, saved: TrainingState
    ) -> None:
        """See the base class."""
        training_state.load(net, optimizer, self.precision.scaler, saved)
        # What is copied is not free for a step to write over, which would be another graph, and be
        # compiled beside the one after it; what an operation gives is.
        self.xm.optimization_barrier_(step_state.in_order(net, optimizer, self.device))
        self.end_step()

    def seed(self, seed: int) -> None:
        super().seed(seed)
        # XLA's own generator begins alike in every process, whatever torch's is set to.
        self.xm.set_rng_state(seed, str(self.device))

    def share_buffers(self, net: nn.Module) -> None:
        super().share_buffers(net)
        if self.topology.world_size == 1:
            return
        # The step after a copy into a buffer would be another graph, for the copied one cannot
        # be donated, and be compiled beside the one after it. A new buffer is as at the start.
        for module in net.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = self._send(buffer.detach().cpu())

    def rng_state(self) -> Tensors:
        seed = int(self.xm.get_rng_state(str(self.device)))
        xla_state = torch.tensor([*(seed % 2**64).to_bytes(8, "little")], dtype=torch.uint8)
        return {**super().rng_state(), "xla": xla_state}

    def load_rng_state(self, states: Tensors) -> None:
        super().load_rng_state(states)
        if "xla" in states:
            seed = int.from_bytes(bytes(states["xla"].tolist()), "little")
            self.xm.set_rng_state(seed, str(self.device))

    def to_device(self, batch: engines.Batch) -> engines.Batch:
        # Not `tensor.to(device)`: that passes through a tensor yet to be computed, which a sync
        # in the training thread would take for a part of the step, and compile it anew.
        def send(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            return host_to_device.send(tensors, self.device, self._index_watch.host_copies)

        return moving.moved(batch, self.device, send)

    def stream(self, batches: Iterable[engines.Batch]) -> Iterator[engines.Batch]:
        return BackgroundGenerator(
            batches, self.topology.local_rank, prefetch.ON_DEVICE, to_device=self.to_device
        )

    def autocast(self) -> AbstractContextManager[Any]:
        return self.precision.autocast()

    @contextmanager
    def calling(self, model: nn.Module) -> Iterator[None]:
        with self.autocast(), inference_mode.replaced_by_no_grad():
            yield

    def batch_for_loop(self, batch: engines.Batch) -> engines.Batch:
        self._index_watch.begin(batch, is_fixed=False)
        return self.output_for_loop(batch)

    def leave_batches(self) -> None:
        self._index_watch.leave()

    def output_for_loop(self, nest: Any) -> Any:
        return inference_mode.viewable(nest)

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        self._index_watch.check()
        try:
            with autocast.rules_active():
                self.precision.scaled(loss).backward(retain_graph=retain_graph)
        except RuntimeError as error:
            if "device_ready_queues_" not in str(error):
                raise
            # Autograd counts the devices at a process's first backward pass.
            raise RequestError(
                "XLA was opened after this process's first backward pass, and autograd does not "
                "know it: train nothing before, or start the script by accbench run --script"
            ) from error

    def apply_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.strategy.reduce(sorted(parameters, key=self._index_of_param.__getitem__))
        precision = self.precision
        if precision.skips_nonfinite:
            precision.find_nonfinite(optimizer)
        if precision.scaler is not None and self.task.clip_norm is not None:
            precision.scaler.unscale_(optimizer)
        self.clip(optimizer)
        if precision.scaler is None:
            found_inf = precision.found_inf if precision.skips_nonfinite else precision.no_overflow
            optimizer.step(found_inf=found_inf)  # type: ignore[call-overload]
        else:
            precision.scaler.step(optimizer)
            precision.scaler.update()
        # Or the step's graph would have every gradient as a result, and keep it in memory.
        optimizer.zero_grad(set_to_none=True)

    def reduce_gradients(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """See the base class."""
        if self.topology.world_size > 1:
            parameters = [*used_parameters.of_loop(model, optimizer)]
            used_parameters.share_new(parameters, self._shared_parameters)
            self.strategy.reduce(parameters, may_change=True)

    def step_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        from accbench.engines.xla import optimizer_conversion, sync_free

        optimizer_conversion.fill_state(optimizer, self._send)  # of a group added late
        if self.precision.scaler is None and isinstance(optimizer, sync_free.SharedStepCounts):
            optimizer.step(found_inf=self.precision.no_overflow)
        else:
            super().step_optimizer(optimizer)

    def end_step(self) -> None:
        self._index_watch.end()
        if self._replay is None or not self._replay.recording:
            self.xla.sync()

    def run_step(
        self,
        step: Callable[..., torch.Tensor], model: nn.Module, spec: Any,
        optimizer: torch.optim.Optimizer, batch: engines.Batch,
    ) -> torch.Tensor:  # fmt: skip
        self._num_steps += 1
        before = self.compile_stats().num_fallbacks if self._num_steps == 1 else 0
        self._index_watch.begin(batch, is_fixed=True)
        loss = self._run_step(step, model, spec, optimizer, batch)
        # Of a step one only knows that operations have left the compiler, not where.
        if self._num_steps == 1 and self.compile_stats().num_fallbacks > before:
            self._left_compiler = self._find_fallbacks(model, spec, optimizer, batch)
        return loss

    def _find_fallbacks(
        self, model: nn.Module, spec: Any, optimizer: torch.optim.Optimizer, batch: engines.Batch
    ) -> list[str]:
        from accbench.engines.xla import fallbacks

        def run_again() -> None:
            with self.autocast():
                loss = spec.loss(model, nested.chunks(batch, self.task.accumulate)[0])
            self.backward(loss)

        random = self.rng_state()
        lines = fallbacks.find(run_again, model, optimizer)
        self.load_rng_state(random)
        self.xla.sync()
        return lines

    def run_score(self, model: nn.Module, spec: Any, batch: engines.Batch) -> torch.Tensor:
        self._index_watch.begin(batch, is_fixed=True)
        return super().run_score(model, spec, batch)

    def left_compiler(self) -> list[str]:
        return self._left_compiler

    def _run_step(
        self, step: Callable[..., torch.Tensor], model: nn.Module, spec: Any,
        optimizer: torch.optim.Optimizer, batch: engines.Batch,
    ) -> torch.Tensor:  # fmt: skip
        if self._replay is None:
            # On the host's reduction a step ends in two graphs, and both would give all of it back.
            is_one_graph = self.strategy.collectives == "in_graph" or self.topology.world_size == 1
            if self._fused and is_one_graph:
                step_state.read_in_order(model, optimizer, self.device)
            return step(self, model, spec, optimizer, batch)

        def traced() -> torch.Tensor:
            return step(self, model, spec, optimizer, batch)

        loss: torch.Tensor = self._replay.run(traced, model, optimizer, batch, spec.loss)
        return loss

    @property
    def num_replayed(self) -> int:
        """Steps that were replayed instead of traced."""
        return 0 if self._replay is None else self._replay.num_replayed

    def wait(self) -> None:
        self.xm.wait_device_ops()

    def peak_memory_bytes(self) -> int:
        if self.task.device == "cpu":
            return peak_resident_bytes()
        return int(self.xm.get_memory_info(self.device)["peak_bytes_used"])

    def start_profile(self, folder: Path, expected_s: float) -> Callable[[], None]:
        return profiling.start(folder, self.topology.rank, expected_s)

    def compile_stats(self) -> engines.CompileStats:
        # A script's loop may read a loss, and print it.
        allowed = () if self.task.script is None else ("aten::_local_scalar_dense",)
        return metrics.compile_stats(allowed)
