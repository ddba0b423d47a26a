"""Training compiled by XLA, through torch_xla: `--compiler-opt`.

One step is traced into one graph that ends at `torch_xla.sync()`. Where the
device has collectives between processes, the gradients' all-reduce is part of
that graph. XLA on the CPU has none, and its `all_reduce` does nothing without
saying so; there the step is cut in two, and gloo averages the gradients on the
host in between.
"""

import dataclasses
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from accbench import engines
from accbench.config import TaskConfig
from accbench.config.field import flag
from accbench.data import moving, nested, prefetch
from accbench.data.prefetch import BackgroundGenerator
from accbench.distributed.process_group import Topology
from accbench.engines import optimizers
from accbench.engines.common import (
    compile_cache_key,
    extra_inputs,
    model_state,
    optimizer_state,
    tied_parameters,
    training_state,
)
from accbench.engines.common.training_state import Tensors, TrainingState
from accbench.engines.ddp.engine import peak_resident_bytes
from accbench.engines.loops import LoopEngine
from accbench.engines.precision import Precision
from accbench.engines.xla import (
    autocast,
    call_checks,
    cuda,
    device_module,
    host_to_device,
    index_watch,
    kernels,
    lazy_import,
    profiling,
    reduction,
)
from accbench.engines.xla.kernels import batchnorm, recurrent
from accbench.errors import RequestError
from accbench.pjrt import devices, xla_flags
from accbench.recording import provenance
from accbench.recording.terminal import log
from accbench.system import cache_folders, extras

_PJRT_DEVICE = {"cpu": "CPU", "cuda": "CUDA", "tpu": "TPU"}


class XlaPrecision(Precision):
    """The types of a step on XLA's device."""

    def loss_scale(self) -> float | None:
        # Not `get_scale()`, which counts as an operation that left the compiler.
        if self.scaler is None or self.scaler._scale is None:
            return None
        return float(self.scaler._scale.cpu().item())


class Engine(LoopEngine):
    """torch_xla: one graph a step, a syncfree optimizer, gradients averaged in the graph."""

    compiler = "xla"
    step_tracer = "accbench.preflight.tracing.xla"

    @dataclasses.dataclass(frozen=True)
    class Options:
        """Options of the engine xla."""

        compile_cache: Literal["auto", "on", "off"] = flag(
            "auto",
            "Keep compiled graphs on disk. auto: on if the platform can load what it saved.",
        )
        cache_dir: str | None = flag(
            None,
            "The cache's folder. Unset: accbench/xla in the user's cache folder.",
            is_path=True,
        )
        bucket_mib: int = flag(
            20,
            "Size in MiB of the buckets for gradients averaged in the graph: each bucket starts as "
            "soon as the backward pass has its gradients.",
            minimum=1,
        )
        host_bucket_mib: int = flag(
            64,
            "Size in MiB of the buckets for gradients averaged on the host.",
            minimum=1,
        )
        replay: Literal["auto", "on", "off"] = flag(
            "auto",
            "Run recorded steps without tracing them again. auto: on where that is proven to give "
            "the same numbers, which is one worker on a CPU.",
        )
        lean: Literal["auto", "on", "off"] = flag(
            "auto",
            "Compute BatchNorm, ReLU, max-pooling and AdamW in a form that moves fewer bytes on a "
            "GPU. auto: off on a CPU, where that is slower.",
        )
        flags: str = flag(
            "",
            "More XLA flags, `name=value` separated by blanks; those in XLA_FLAGS win.",
        )

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
    def worker_env(cls, task: TaskConfig, local_rank: int) -> dict[str, str]:
        env = {
            "PJRT_DEVICE": _PJRT_DEVICE[task.device],
            # Where something imports inductor, it starts a process a core to compile in;
            # they would take the cores from the first steps for nothing.
            "TORCH_WARM_POOL": "0",
        }
        if task.device == "cpu" and task.threads:
            # XLA sizes its thread pool by this name or by the machine's cores.
            env["NPROC"] = str(task.threads)
        return env

    def __init__(self, task: TaskConfig, options: Options, topology: Topology) -> None:
        super().__init__(task, options, topology)
        flags = xla_flags.merge(task.device, options.flags)
        if flags:  # XLA reads them once, when a device is first used
            os.environ["XLA_FLAGS"] = flags
        self.xla = lazy_import.torch_xla()
        import torch_xla.core.xla_model as xm
        import torch_xla.runtime as xr

        self.xm, self.xr = xm, xr
        device_module.register()
        self._cache = self._start_cache()
        self.device = self._open_device()
        xm.set_replication(self.device, xm.get_xla_supported_devices())
        in_graph = task.device != "cpu"
        mib = options.bucket_mib if in_graph else options.host_bucket_mib
        self.strategy: reduction.XlaDataParallel = reduction.XlaDataParallel(
            topology, self.device, in_graph, mib * 2**20
        )
        self.precision = XlaPrecision(task)
        if self.precision.needs_loss_scale:
            from accbench.engines.xla import sync_free

            with warnings.catch_warnings():  # torch_xla names its parent by an old name
                warnings.simplefilter("ignore", FutureWarning)
                self.precision.scaler = sync_free.SyncFreeGradScaler()
        self._no_overflow = torch.zeros(()).to(self.device)
        self._lean = options.lean == "on" or (options.lean == "auto" and task.device != "cpu")
        kernels.register_all(self._lean)
        self._replay = self._start_replay()
        self._anew = self._lean and self._replay is None  # a recording has its places
        if self.precision.scaler is not None:
            self.precision.scaler.fresh_step_tensors = self._anew
        self._num_run = 0
        self._indices = index_watch.IndexWatch()
        self._left_compiler: list[str] = []

    def _open_device(self) -> torch.device:
        if self.task.device == "cuda":
            cuda.register(self.topology.world_size)
        if self.task.device != "cpu":
            from torch_xla._internal import pjrt

            pjrt.initialize_multiprocess(self.topology.local_rank, self.topology.local_world_size)
        device: torch.device = self.xla.device()
        wanted, got = _PJRT_DEVICE[self.task.device], self.xm.xla_device_hw(device)
        if got != wanted:  # as the client behind it says
            raise RequestError(
                f"--device {self.task.device}, but torch_xla came up on {got}; "
                "is PJRT_DEVICE set to something else?"
            )
        return device

    def _start_replay(self) -> Any | None:
        proven = self.task.device == "cpu" and self.topology.world_size == 1
        if self.options.replay == "off" or (self.options.replay == "auto" and not proven):
            return None
        from accbench.engines.xla.replay import StepReplay

        return StepReplay(self.device, self.precision.scaler, log.info)

    def _start_cache(self) -> str:
        # Before the first computation, and void across versions: torch_xla's two rules.
        wanted = self.options.compile_cache
        if wanted == "off":
            return "off: --xla.compile_cache off"
        if wanted == "auto" and self.task.device == "cpu":
            return "off: XLA on the CPU saves compiled graphs but cannot load them"
        folder = Path(self.options.cache_dir or cache_folders.folder("xla"))
        processor = (
            compile_cache_key.processor_fingerprint()
        )  # also what is made for a GPU has code for it
        folder = folder / f"{version('torch_xla')}-{self.task.device}-{processor}"
        folder = folder / f"rank{self.topology.rank}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RequestError(
                f"compiled graphs cannot be kept in {folder}: {error.strerror}; name another "
                "folder by --xla.cache_dir, or keep none by --xla.compile_cache off"
            ) from error
        self.xr.initialize_cache(str(folder))
        return str(folder)

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
        for name, parameter in net.named_parameters():
            if parameter.is_complex():
                raise RequestError(
                    f"torch_xla has no complex parameters, as {name} is: no norms, no gradients of "
                    "several operations on them; use --engine jax, inductor or ddp"
                )

    def prepare(self, model: nn.Module) -> nn.Module:
        for name, module in model.named_modules():
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
                raise RequestError(
                    f"engine xla has no sparse gradients, which {name or 'the model'} has "
                    "(sparse=True); leave that out, or use another --engine"
                )
        batchnorm.average_cumulatively(model)
        recurrent.use_scan(model)
        places, given = tied_parameters.find_ties(model), dict(model.named_parameters())
        model = model.to(self.device)
        tied_parameters.restore_ties(places)  # XLA's tensors are new ones, one for each place
        for name, parameter in model.named_parameters():
            tied_parameters.copy_attributes_and_hooks(given[name], parameter)
        self._check_calls(model)
        return model

    def _check_calls(self, model: nn.Module) -> None:
        call_checks.check_calls(model)

    @staticmethod
    def computed_again(given: Any, gradient: torch.Tensor) -> tuple[Any, torch.Tensor]:
        # XLA would find what was computed before, and keep that. A barrier hides that it is the
        # same, and has it wait for the gradient: else all would be computed again at once.
        import torch_xla.core.xla_model as xm

        tensors = nested.tensors_of(given)
        copies = [tensor.detach().clone() for tensor in tensors]
        gradient = gradient.clone()
        xm.optimization_barrier_([gradient, *copies])
        for tensor, copy in zip(tensors, copies, strict=True):
            copy.requires_grad_(tensor.requires_grad)
        return nested.with_tensors(given, copies), gradient

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        from accbench.engines.xla import sync_free

        entry = optimizers.of_task(self.task)
        xla_class = entry.xla_class() or sync_free.class_from_update_rule(entry)
        optimizer: Any = xla_class(
            optimizer_state.groups(self.task, model), **entry.arguments(self.task)
        )

        def zeros_like(tensor: torch.Tensor) -> torch.Tensor:
            return torch.zeros(tensor.shape, dtype=tensor.dtype).to(self.device)

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            return self.to_device((tensor.cpu(),))[0]

        if isinstance(optimizer, sync_free.SyncFreeAdamW):
            optimizer.as_vectors = self._lean
        if isinstance(optimizer, sync_free.SharedStepCounts):
            optimizer.fresh_step_tensors = self._anew
        if isinstance(optimizer, sync_free.SharedStepCounts) and self._replay is not None:
            optimizer.is_recorded = lambda: self._replay.recording  # type: ignore[method-assign, union-attr]
            self._replay.settle = lambda: optimizer.split_counts(
                optimizer.stepped, lambda count: self.to_device(count.cpu())
            )
        self._note_places(model)
        self._trace_where_python_keeps_state(model)
        # State that appears in the first step would make the second another graph.
        optimizer_state.make_state(self.task, optimizer, zeros_like, copy)
        self._place_counts(optimizer)
        optimizer.register_load_state_dict_post_hook(self._place_counts)
        if self.precision.scaler is not None:
            self._make_scaler_state(self.precision.scaler)
        self.xla.sync()
        return optimizer

    def _trace_where_python_keeps_state(self, model: nn.Module) -> None:
        name = model_state.first_with_extra_state(model)
        if self._replay is not None and name is not None:
            # A forward pass may change it, which a recorded step would not run.
            self._replay.give_up(f"{name or 'the model'} has extra state (get_extra_state)")

    def _note_places(self, model: nn.Module) -> None:
        # In the order of the model's modules, whatever groups they are in.
        self._places = {parameter: place for place, parameter in enumerate(model.parameters())}

    def adopt_optimizer(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        from accbench.engines.xla import optimizer_conversion

        self._note_places(model)
        optimizer_conversion.convert(optimizer, lambda t: self.to_device((t,))[0], self._lean)
        if self.precision.scaler is not None:
            self._make_scaler_state(self.precision.scaler)
        self.xla.sync()

    def _place_counts(self, optimizer: torch.optim.Optimizer) -> None:
        from accbench.engines.xla import sync_free

        if isinstance(optimizer, sync_free.SharedStepCounts):
            optimizer.share_counts(lambda count: self.to_device((count,))[0])
        # torch moves what it loads to the parameters' device, but not the step counts.
        for kept in optimizer.state.values():
            if kept["step"].device != self.device:
                kept["step"] = kept["step"].to(self.device)

    def _make_scaler_state(self, scaler: Any) -> None:
        # As above: the growth tracker is an integer at first and a computed tensor
        # later, so one update that changes nothing is run, and its count taken back.
        scaler._lazy_init_scale_growth_tracker(self.device)
        torch._amp_update_scale_(
            scaler._scale, scaler._growth_tracker, self._no_overflow,
            scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval(),
        )  # fmt: skip
        self.xla.sync()
        scaler._growth_tracker.zero_()
        self.xla.sync()

    def load_training_state(
        self, net: nn.Module, optimizer: torch.optim.Optimizer, saved: TrainingState
    ) -> None:
        """See the base class."""
        training_state.load(net, optimizer, self.precision.scaler, saved)
        # What is copied is not free for a step to write over, which would be another graph, and be
        # compiled beside the one after it; what an operation gives is.
        self.xm.optimization_barrier_(self._changed_by_steps(net, optimizer))
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
                    module._buffers[name] = self.to_device((buffer.detach().cpu(),))[0]

    def rng_state(self) -> Tensors:
        seed = int(self.xm.get_rng_state(str(self.device)))
        of_xla = torch.tensor([*(seed % 2**64).to_bytes(8, "little")], dtype=torch.uint8)
        return {**super().rng_state(), "xla": of_xla}

    def load_rng_state(self, states: Tensors) -> None:
        super().load_rng_state(states)
        if "xla" in states:
            seed = int.from_bytes(bytes(states["xla"].tolist()), "little")
            self.xm.set_rng_state(seed, str(self.device))

    def to_device(self, batch: engines.Batch) -> engines.Batch:
        # Not `tensor.to(device)`: that passes through a tensor yet to be computed, which a sync
        # in the training thread would take for a part of the step, and compile it anew.
        def send(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            return host_to_device.send(tensors, self.device, self._indices.host_copies)

        return moving.moved(batch, self.device, send)

    def stream(self, batches: Iterable[engines.Batch]) -> Iterator[engines.Batch]:
        return BackgroundGenerator(
            batches, self.topology.local_rank, prefetch.ON_DEVICE, to_device=self.to_device
        )

    def autocast(self) -> AbstractContextManager[Any]:
        if self.precision.autocast_dtype is None:
            return nullcontext()
        return autocast.autocast(self.precision.autocast_dtype, self._lean)

    @contextmanager
    def calling(self, model: nn.Module) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self.autocast())
            if torch.is_inference_mode_enabled():
                # There torch_xla 2.8 has no views of tensors that were made outside of it.
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.no_grad())
            yield

    def given(self, batch: engines.Batch) -> engines.Batch:
        self._indices.begin(batch, is_fixed=False)
        return self.results(batch)

    def leave_batches(self) -> None:
        self._indices.leave()

    def results(self, nest: Any) -> Any:
        # Of what was made inside of it there are views.
        if not torch.is_inference_mode_enabled():
            return nest
        return nested.mapped(nest, torch.clone, doing="copied under torch.inference_mode")

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        self._indices.look()
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
        self.reduce_gradients(optimizer)
        precision = self.precision
        if precision.skips_nonfinite:
            precision.find_nonfinite(optimizer)
        if precision.scaler is not None and self.task.clip_norm is not None:
            precision.scaler.unscale_(optimizer)
        self.clip(optimizer)
        if precision.scaler is None:
            found_inf = precision.found_inf if precision.skips_nonfinite else self._no_overflow
            optimizer.step(found_inf=found_inf)  # type: ignore[call-overload]
        else:
            precision.scaler.step(optimizer)
            precision.scaler.update()
        # Or the step's graph would have every gradient as a result, and keep it in memory.
        optimizer.zero_grad(set_to_none=True)

    def reduce_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.strategy.reduce(sorted(parameters, key=self._places.__getitem__))

    def step_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        from accbench.engines.xla import optimizer_conversion, sync_free

        optimizer_conversion.fill_state(
            optimizer, lambda t: self.to_device((t,))[0]
        )  # of a group added late
        if self.precision.scaler is None and isinstance(optimizer, sync_free.SharedStepCounts):
            optimizer.step(found_inf=self._no_overflow)
        else:
            super().step_optimizer(optimizer)

    def end_step(self) -> None:
        self._indices.end()
        if self._replay is None or not self._replay.recording:
            self.xla.sync()

    def run_step(
        self,
        step: Callable[..., torch.Tensor],
        model: nn.Module,
        spec: Any,
        optimizer: torch.optim.Optimizer,
        batch: engines.Batch,
    ) -> torch.Tensor:
        self._num_run += 1
        before = self.compile_stats().num_fallbacks if self._num_run == 1 else 0
        self._indices.begin(batch, is_fixed=True)
        loss = self._run_step(step, model, spec, optimizer, batch)
        # Of a step one only knows that operations have left the compiler, not where.
        if self._num_run == 1 and self.compile_stats().num_fallbacks > before:
            self._left_compiler = self._find_fallbacks(model, spec, optimizer, batch)
        return loss

    def _find_fallbacks(
        self, model: nn.Module, spec: Any, optimizer: torch.optim.Optimizer, batch: engines.Batch
    ) -> list[str]:
        """Goes forward and back once more, for nothing but that and with nothing of it left: a
        step that is looked at can come out wrong, for under a dispatch mode torch_xla's slice of
        what `repeat` gave is of what that was before."""
        from accbench.engines.xla.fallbacks import FallbackFinder

        random, kept = self.rng_state(), [(m, dict(m._buffers)) for m in model.modules()]
        extra = model_state.read_extra(model)
        copies = {id(buffer): buffer.detach().clone() for buffer in model.buffers()}
        for module, buffers in kept:  # which a copy back would make another program's
            module._buffers.update(
                {n: b if b is None else copies[id(b)] for n, b in buffers.items()}
            )
        self.xla.sync()
        with FallbackFinder() as finder, extra_inputs.replaced(extra_inputs.tensors()):
            with self.autocast():
                loss = spec.loss(model, nested.chunks(batch, self.task.accumulate)[0])
            self.backward(loss)
        optimizer.zero_grad(set_to_none=True)
        for module, buffers in kept:
            module._buffers.update(buffers)
        model_state.load_extra(model, extra)
        self.load_rng_state(random)
        self.xla.sync()
        return finder.lines()

    def run_score(self, model: nn.Module, spec: Any, batch: engines.Batch) -> torch.Tensor:
        self._indices.begin(batch, is_fixed=True)
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
            if self._lean and is_one_graph:
                self._read_state_in_order(model, optimizer)
            return step(self, model, spec, optimizer, batch)

        def traced() -> torch.Tensor:
            return step(self, model, spec, optimizer, batch)

        loss: torch.Tensor = self._replay.run(traced, model, optimizer, batch, spec.loss)
        return loss

    def _read_state_in_order(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Have the graph take what the step changes in the order in which it gives it back.

        A new value is written over an old one. torch_xla says of which inputs the memory is
        free, and XLA hands it out to results of equal size by their order; a value that is
        written over another's place is computed elsewhere and copied. Inputs are numbered by
        who reads them first: here one operation, which leaves nothing behind, its last operand
        first. Results come in the order in which their tensors were made, buffers last and in
        the model's order, for these are made anew in each step.
        """
        self.xm.optimization_barrier_(self._changed_by_steps(model, optimizer)[::-1])

    def _changed_by_steps(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> list[torch.Tensor]:
        """Parameters and what is kept of them in the order in which they were made, and buffers."""
        learned = {p: None for group in optimizer.param_groups for p in group["params"]}
        of_optimizer = (optimizer.state.get(p, {}).values() for p in learned)
        kept = [*learned, *(t for of_one in of_optimizer for t in of_one)]
        unique = {id(t): t for t in kept if isinstance(t, torch.Tensor) and t.device == self.device}
        number = self.xla._XLAC._xla_get_tensor_id
        buffers = {id(b): b for b in model.buffers() if b.device == self.device}
        return [*sorted(unique.values(), key=number), *buffers.values()]

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
        import torch_xla.debug.metrics as metrics

        num_compiles, compile_ns, _ = metrics.metric_data("CompileTime") or (0, 0.0, None)
        num_executions, _, _ = metrics.metric_data("ExecuteTime") or (0, 0.0, None)
        fallbacks = [name for name in metrics.counter_names() if name.startswith("aten::")]
        if self.task.script is not None:  # whose loop may read a loss, and prints it
            fallbacks = [name for name in fallbacks if name != "aten::_local_scalar_dense"]
        return engines.CompileStats(
            num_compiles=num_compiles,
            compile_s=compile_ns / 1e9,
            num_executions=num_executions,
            num_fallbacks=sum(metrics.counter_value(name) or 0 for name in fallbacks),
        )
