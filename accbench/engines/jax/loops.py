"""Loops of a user's own through JAX: forward and backward pass, each a compiled function.

A loop that somebody wrote cannot be one function, as a step of accbench's own is: the loss, the
optimizer and all else in it are torch's. `torch.compile` finds the model's graphs, AOTAutograd
parts each into a forward and a backward pass, and the table of `lowering` turns these into JAX.
On a CPU both sides read and write the same memory.
"""

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from accbench import engines
from accbench.config import TaskConfig
from accbench.distributed.process_group import Topology
from accbench.engines.common import index_ranges
from accbench.engines.inductor import engine as inductor
from accbench.engines.jax import kernel_dtypes, runtime, traceable


class Engine(inductor.Engine):
    """Graphs of torch.compile through JAX, under DistributedDataParallel; the rest as in ddp."""

    compiler = "xla"

    def __init__(self, task: TaskConfig, options: Any, topology: Topology) -> None:
        """Open the engine with the options of engine jax.

        Args:
            task: the run's.
            options: the engine jax's.
            topology: the ranks.
        """
        super().__init__(
            task,
            # JAX has no strides, and graphs depend on those of their inputs.
            inductor.Engine.Options(
                channels_last=False, find_unused_parameters=options.find_unused_parameters
            ),
            topology,
        )
        runtime.configure(task.device, options.flags)
        self._cache = runtime.enable_compile_cache(task.device, options)
        from accbench.engines.jax import data_mesh

        self._jax_device = data_mesh.local_device()
        self._rules = runtime.lowering_rules(task.device, options)
        self._backward_s = 0.0
        self._in_dynamo = False

    @property
    def compile_cache(self) -> str:
        return self._cache

    @contextlib.contextmanager
    def _compile_lock(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if Path(self._cache).is_absolute():
                stack.enter_context(super()._compile_lock())
            yield

    def _backend(self) -> Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]:
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.aot_autograd import make_boxed_func
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        from accbench.engines.jax import lowering

        def forward(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            return make_boxed_func(self._function(graph, inputs))

        def backward(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            begun = time.perf_counter()
            function = make_boxed_func(self._function(graph, inputs))
            if not self._in_dynamo:  # which counts its own time
                self._backward_s += time.perf_counter() - begun
            return function

        to_functions = aot_autograd(
            fw_compiler=forward, bw_compiler=backward, inference_compiler=forward,
            partition_fn=min_cut_rematerialization_partition,
            decompositions=lowering.decompositions(),
        )  # fmt: skip

        def backend(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            self._in_dynamo = True
            differentiable = self._differentiable(graph)
            check = _check_of_indices(graph)
            try:
                dtype = (
                    torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
                )
                with (
                    traceable.attention_backends(runtime.keeps_attention(self._rules, dtype)),
                    kernel_dtypes.patch_fake_mode(),
                ):  # fmt: skip
                    run = self._count_calls(to_functions(graph, inputs), differentiable)
                    return _checked(run, check)
            finally:
                self._in_dynamo = False

        return backend

    def compile_stats(self) -> engines.CompileStats:
        return super().compile_stats() + engines.CompileStats(compile_s=self._backward_s)

    def _function(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., list[Any]]:
        """Compile the graph to a function from torch's tensors to torch's tensors."""
        import jax

        from accbench.engines.jax import arrays, lowering

        (output,) = graph.graph.find_nodes(op="output")
        outputs = list(output.args[0])
        # Inputs that a forward pass returns for the backward pass as they are, weights for the
        # most part, would be copied.
        input_index = {node: i for i, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
        passed_through = [input_index.get(node) for node in outputs]
        output.args = ([node for node in outputs if node not in input_index],)
        draws = any(_draws(node) for node in graph.graph.nodes)

        def run(squeezed_arrays: list[Any], key_data: Any) -> list[Any]:
            key = jax.random.wrap_key_data(key_data) if draws else None
            pairs = zip(squeezed_arrays, shapes, strict=True)
            arrays_in_shape = [array.reshape(shape) for array, shape in pairs]
            return lowering.run_graph(graph, arrays_in_shape, key, self._rules)

        # Without axes of length 1: dlpack tells nothing of their strides, and JAX may take them
        # for another order of axes than the one that this is compiled for.
        shapes = [tuple(tensor.shape) for tensor in inputs]
        squeezed = [
            jax.ShapeDtypeStruct([n for n in t.shape if n != 1], lowering.jax_dtype(t.dtype))
            for t in inputs
        ]
        with self._compile_lock():
            key_data = jax.ShapeDtypeStruct((2,), "uint32")
            compiled = jax.jit(run).lower(squeezed, key_data).compile()

        def function(*tensors: torch.Tensor) -> list[Any]:
            inputs = [arrays.from_torch(tensor.squeeze(), self._jax_device) for tensor in tensors]
            computed = iter(compiled(inputs, _random_key_data(draws)))
            return [
                _tensor_of(next(computed)) if index is None else tensors[index]
                for index in passed_through
            ]

        return function


def _check_of_indices(graph: fx.GraphModule) -> Callable[[Sequence[Any]], None] | None:
    """Return what refuses inputs whose indices are out of range; None if there are none."""
    placeholders = graph.graph.find_nodes(op="placeholder")
    values = [node.meta.get("example_value") for node in placeholders]
    indices = [
        index for index, value in enumerate(values)
        if isinstance(value, torch.Tensor) and not value.requires_grad
    ]  # fmt: skip
    ranges = index_ranges.ranges_of_graph(graph, indices)
    if not ranges.checks:
        return None
    # dynamo names them after the arguments: l_kwargs_labels_.
    names = [re.sub(r"^[lL]_((kw)?args_)?|_$", "", placeholders[index].name) for index in indices]

    def check(inputs: Sequence[Any]) -> None:
        ranges.refuse([inputs[index].detach() for index in indices], names)

    return check


def _checked(
    run: Callable[..., Any], check: Callable[[Sequence[Any]], None] | None
) -> Callable[..., Any]:
    if check is None:
        return run

    def checked(*inputs: Any) -> Any:
        check(inputs)
        return run(*inputs)

    return checked


def _draws(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _random_key_data(draws: bool) -> Any:
    """Draw the data of a key, (2,) uint32, from torch's generator if the graph draws anything."""
    import numpy as np

    if not draws:
        return np.zeros(2, np.uint32)
    return torch.randint(2**32, (2,)).numpy().astype(np.uint32)


def _tensor_of(array: Any) -> torch.Tensor | None:
    from accbench.engines.jax import arrays

    return None if array is None else arrays.to_torch(array)
