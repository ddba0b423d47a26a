"""Training compiled by `torch.compile`'s inductor, inside DDP.

`DDP(torch.compile(model))`, not the other way round: compiling the wrapper can
break the graph at every bucket and then compile nothing, without saying so.
Because that can happen for other reasons too, graphs are counted as they run. Inside
DDP's forward pass dynamo cuts the model where DDP's gradient buckets end, so that
averaging overlaps the backward pass: several graphs a step with several workers, except
on the CPU of one machine.
"""

import contextlib
import dataclasses
import importlib.util
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import _StopRecomputationError

from accbench import engines
from accbench.config import TaskConfig
from accbench.config.field import flag
from accbench.distributed.process_group import Topology
from accbench.distributed.strategies.data_parallel import requires_grad
from accbench.engines.common import (
    compile_cache_key,
    decompositions,
    model_errors,
    python_state,
    source_location,
)
from accbench.engines.common.double_backward import DifferentiableGraph
from accbench.engines.ddp import engine as ddp
from accbench.engines.ddp.options import TorchOptions
from accbench.engines.inductor import (
    compile_cache_files,
    full_disk,
    patches,
    vector_instructions,
)
from accbench.errors import RequestError, errors_behind
from accbench.system import cache_folders, extras

_CACHE, _TRITON_CACHE = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
# dynamo's own names of its phases, in `compile_times`: tracing with the forward's
# compilation, and the backward's where that is put off to the first backward pass.
_PHASES = ("_compile.compile_inner", "compile_fx.<locals>.bw_compiler")


def _graph_break_line(reason: str, stack: list[traceback.FrameSummary]) -> str:
    where = source_location.find_model_line(stack)
    what = reason.strip().splitlines()[0] if reason.strip() else "no reason given"
    return f"the graph breaks: {what}{f' at {where}' if where else ''}"


def _allow_repeated_backward() -> None:
    """Let compiled graphs go back twice (retain_graph, create_graph), from now on.

    What is saved for a backward pass would be memory for its results else. torch looks at the
    setting when it compiles and again in each backward pass.
    """
    from torch._functorch import config

    config.donated_buffer = False


def _is_transformed() -> bool:
    """Return whether forward mode or torch.func is at work, which compiled graphs ignore."""
    level: int = torch.autograd.forward_ad._current_level
    return level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


def _recompile_when_trained_parameters_change(model: nn.Module) -> None:
    """Recompile when a parameter's `requires_grad` or a module's hooks have changed.

    Dynamo looks at neither: an unfrozen parameter would never train, and a hook that is added
    would never be called.
    """
    compiled: Any = model._compiled_call_impl
    before: list[Any] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        if _is_transformed():
            return model._call_impl(*args, **kwargs)
        now = [*requires_grad(model), *python_state.hook_ids(model)]
        if before and now != before:
            torch._dynamo.reset_code_caches()
        before[:] = now
        try:
            return compiled(*args, **kwargs)
        except _StopRecomputationError:  # how torch's checkpointing ends a second pass early
            raise
        except Exception as error:
            _raise_model_error(error, model, lambda: model._call_impl(*args, **kwargs))
            raise

    model._compiled_call_impl = call


def _guard_changed_attributes() -> None:
    """Have dynamo's guards read modules' attributes, where torch 2.9 to 2.14 may skip that.

    They skip it while the tag of a module's dictionary is the same. Under Python 3.13 it stays the
    same where an attribute is set, so that a compiled step went on with the value of before.
    """
    name = "use_recursive_dict_tags_for_guards"
    if sys.version_info >= (3, 13) and hasattr(torch._dynamo.config, name):
        setattr(torch._dynamo.config, name, False)


def _raise_model_error(error: Exception, model: nn.Module, call: Callable[[], Any]) -> None:
    """Raise what the model raises without a compiler; else say that the compiler is at fault."""
    from torch._dynamo.exc import TorchDynamoException

    if isinstance(error, (RequestError, MemoryError, torch.OutOfMemoryError)):
        return
    for cause in errors_behind(error):
        if isinstance(cause, RequestError):  # raised while compiling, and wrapped by dynamo
            raise RequestError(str(cause)) from error
    model_error = model_errors.error_of_call(model, call)
    if model_error is not None:
        raise model_error from None
    if isinstance(error, TorchDynamoException):
        location = source_location.find_model_line(traceback.extract_tb(error.__traceback__))
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise RequestError(
            f"torch.compile fails on the model{f' at {location}' if location else ''}, which plain "
            f"torch runs: {type(error).__name__}: {' '.join(lines)[:300]}; use --engine ddp or xla"
        ) from error


class _Decompositions(dict[Any, Callable[..., Any]]):
    """Decompositions, which torch 2.15 pickles for the key of its cache and cannot pickle.

    Their place in the key is taken by the versions of torch and of accbench, which are in it.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return str, ("accbench.engines.inductor",)


class Engine(ddp.Engine):
    """torch.compile with inductor under DistributedDataParallel; the rest as in ddp."""

    @dataclasses.dataclass(frozen=True)
    class Options(TorchOptions):
        """Options of the engine inductor."""

        mode: Literal["default", "reduce-overhead", "max-autotune"] = flag(
            "default",
            "torch.compile's mode.",
        )
        dynamic: Literal["off", "auto", "on"] = flag(
            "off",
            "Compile for sizes that may change. off: compile again for each size. auto: compile "
            "for any size once a second size comes. on: compile for any size from the start.",
        )
        cache_dir: str | None = flag(
            None,
            "Folder of the compile cache, with a folder in it for each kind of processor. "
            "Unset: inductor's default in the temporary folder.",
            is_path=True,
        )

    compiler = "inductor"

    @classmethod
    def unavailable_reason(cls, task: TaskConfig) -> str | None:
        if task.device == "tpu":
            return "engine inductor has no TPU support; use --engine xla or --device cpu"
        if task.device == "cpu" and not (shutil.which("g++") or shutil.which("clang++")):
            return "engine inductor compiles C++ on a CPU and finds no g++ or clang++; install one"
        if task.device == "cuda" and importlib.util.find_spec("triton") is None:
            return (
                "engine inductor needs triton on CUDA, which is not installed: "
                + extras.dependency_command("torch", "triton")
            )
        return super().unavailable_reason(task)

    @classmethod
    def worker_env(cls, task: TaskConfig, local_rank: int) -> dict[str, str]:
        run_dir = None if task.output_dir is None else task.run_dir
        env = cache_folders.inductor_environment(run_dir)
        if task.device == "cpu":
            # Processes that compile for Triton, which a CPU has no use for; each imports torch.
            env = {**env, "TORCH_WARM_POOL": "0"}
        if not cls.variables_replaced_by_flags(task):
            return env
        # A folder a processor, for code is compiled for the one that is here (-march=native).
        folder = (
            Path(task.options["inductor"].cache_dir).absolute()
            / compile_cache_key.processor_fingerprint()
        )
        with contextlib.suppress(OSError), full_disk.reported(str(folder)):
            folder.mkdir(parents=True, exist_ok=True)  # torch does, while it is imported
        return {**env, _CACHE: str(folder), _TRITON_CACHE: str(folder / "triton")}

    @classmethod
    def variables_replaced_by_flags(cls, task: TaskConfig) -> frozenset[str]:
        options = task.options.get("inductor")
        if options is None or options.cache_dir is None:
            return frozenset()
        # Both, or Triton keeps its kernels where a "cold" run finds them again.
        return frozenset({_CACHE, _TRITON_CACHE})

    def __init__(self, task: TaskConfig, options: Options, topology: Topology) -> None:
        super().__init__(task, options, topology)
        self.mode = options.mode
        if task.script is not None:
            _allow_repeated_backward()
        self.num_compiles = self.num_executions = self.num_eager_gradients = 0

    @property
    def compile_cache(self) -> str:
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        return str(cache_dir())

    def _compile(self, model: nn.Module) -> nn.Module:
        from torch._dynamo import trace_rules
        from torch._dynamo.external_utils import wrap_inline

        self._set_overlap()
        _guard_changed_attributes()
        backend = self._backend()
        # In place: the module keeps its class and its parameters' names.
        dynamic = {"off": False, "auto": None, "on": True}[self.options.dynamic]
        nn.Module.compile(model, backend=backend, dynamic=dynamic)
        forward: Any = model.forward
        while isinstance(forward, partial):  # what has replaced it for this module alone
            forward = forward.func
        if trace_rules.check(forward):
            # A class of torch's own, nn.Sequential for one: dynamo passes over its frames, and
            # would compile nothing. torch.compile(model) adds a frame there, too.
            call = wrap_inline(model._call_impl)
            model._compiled_call_impl = torch.compile(call, backend=backend, dynamic=dynamic)
        _recompile_when_trained_parameters_change(model)
        return model

    def _set_overlap(self) -> None:
        """Compile the model whole where averaging uses the processors that compute.

        There is nothing to overlap then, and torch's cache refuses graphs that were cut: each start
        would trace the model's gradients again.
        """
        is_one_machine = self.topology.local_world_size == self.topology.world_size
        if self.device.type == "cpu" and is_one_machine:
            torch._dynamo.config.optimize_ddp = False

    def _backend(self) -> Callable[[torch.fx.GraphModule, list[Any]], Callable[..., Any]]:
        """Return the function that compiles dynamo's graphs; it counts graphs and their runs."""
        from accbench.engines.inductor import cache_digests  # imports inductor

        cache_digests.begin(self.device.type)
        from torch._inductor import list_mode_options
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner
        from torch._inductor.decomposition import select_decomp_table

        rules = _Decompositions({**select_decomp_table(), **decompositions.corrected()})
        # Inductor leaves complex numbers to torch, but takes their addition apart, which fails
        # where the last axis is not contiguous (torch 2.8). Real ones are not touched.
        for operation in (torch.ops.aten.add.Tensor, torch.ops.aten.add.Scalar):
            rules.pop(operation, None)
        apply_patches: Callable[[], contextlib.AbstractContextManager[None]] = (
            contextlib.nullcontext
        )
        if self.device.type == "cpu":
            with full_disk.reported(self.compile_cache):
                vector_instructions.pick()  # may take seconds; not while the others wait their turn
            if patches.needed():
                apply_patches = patches.applied
        config_patches: dict[str, Any] = (
            {} if self.mode == "default" else list_mode_options(self.mode)
        )

        def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            differentiable = self._differentiable(graph)
            # Donated buffers are none in a script (`_allow_repeated_backward`).
            tag = compile_cache_key.tag(self.device.type, self.task.script is not None)

            def compile_locked(*args: Any, **kwargs: Any) -> Any:
                # A backward pass is compiled later, outside of what is entered below.
                with (
                    full_disk.reported(self.compile_cache), self._compile_lock(), apply_patches(),
                    compile_cache_files.checked(), compile_cache_key.tagged(tag),
                ):  # fmt: skip
                    return compile_fx_inner(*args, **kwargs)

            with (
                full_disk.reported(self.compile_cache), compile_cache_files.checked(),
                compile_cache_key.tagged(tag), apply_patches(),
            ):  # fmt: skip
                compiled = compile_fx(
                    graph, inputs, inner_compile=compile_locked, config_patches=config_patches,
                    decompositions=rules,
                )  # fmt: skip
            return self._count_calls(compiled, differentiable)

        return backend

    def _differentiable(self, graph: torch.fx.GraphModule) -> DifferentiableGraph | None:
        """Return what gives a graph second derivatives, which loops of a user's own may ask for."""
        if self.task.script is None:
            return None
        return DifferentiableGraph(graph, self.device.type, self._count_eager_gradient)

    def _count_eager_gradient(self) -> None:
        self.num_eager_gradients += 1

    def _count_calls(
        self, compiled: Any, differentiable: DifferentiableGraph | None
    ) -> Callable[..., Any]:
        self.num_compiles += 1

        def counted(*args: Any) -> Any:
            self.num_executions += 1
            return compiled(*args) if differentiable is None else differentiable.run(compiled, args)

        return counted

    @contextlib.contextmanager
    def _compile_lock(self) -> Iterator[None]:
        """Let one worker compile on a CPU, and the others then load what it made.

        They would all compile the same graph at once otherwise, on the same cores. On
        CUDA a graph names its device, so that no worker could load another's.
        """
        if self.device.type != "cpu" or self.topology.local_world_size == 1:
            yield
            return
        import fcntl  # POSIX alone, as is gloo between several workers here

        folder = Path(self.compile_cache)
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "accbench.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # let go of when the file closes
            yield

    def _wrap(self, model: nn.Module) -> nn.Module:
        for unit in self.strategy.units(model):
            self._compile(unit)
        return super()._wrap(model)

    def _reset_compiled_code(self) -> None:
        torch._dynamo.reset_code_caches()  # its guards don't look at how parameters are laid out

    def left_compiler(self) -> list[str]:
        from torch._dynamo.utils import graph_break_reasons

        lines = [_graph_break_line(str(r.reason), r.user_stack) for r in graph_break_reasons]
        if self.num_eager_gradients:
            lines.append("second derivatives (create_graph=True) are computed eagerly")
        return [*dict.fromkeys(lines)]

    def compile_stats(self) -> engines.CompileStats:
        from torch._dynamo.utils import compile_times, counters

        names, seconds = compile_times("csv", aggregate=True)
        by_phase = {name: float(str(s)) for name, s in zip(names, seconds, strict=True)}
        return engines.CompileStats(
            num_compiles=self.num_compiles,
            compile_s=sum(by_phase.get(phase, 0.0) for phase in _PHASES),
            num_executions=self.num_executions,
            # What dynamo leaves to eager within a loop, as nn.LSTM, is in the second one alone.
            num_fallbacks=self.num_eager_gradients
            + max(sum(counters[kind].values()) for kind in ("graph_break", "unimplemented")),
        )
