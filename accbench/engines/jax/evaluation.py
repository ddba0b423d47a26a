"""Evaluation on the device: a batch's score as a compiled function of weights and batch."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import torch
from torch import nn

from accbench.data import nested
from accbench.engines import CompileStats
from accbench.engines.common import extra_inputs, python_snapshot, python_state
from accbench.engines.jax import arrays, capture, functional, lowering
from accbench.errors import RequestError
from accbench.recording.terminal import log


class CompiledEvaluation:
    """Compiled score functions, one for each signature of batches.

    Args:
        autocast: entered around the forward pass.
        rules: how graphs are lowered.
    """

    def __init__(
        self, autocast: Callable[[], AbstractContextManager[Any]], rules: lowering.Rules
    ) -> None:
        self._autocast, self._rules = autocast, rules
        self._functions: dict[Any, Any] = {}
        self._watches: dict[int, python_state.PythonStateWatch] = {}
        self.stats = CompileStats()

    def score(
        self, net: nn.Module, spec: Any, batch: Any, weights: tuple[Sequence[Any], Sequence[Any]],
        inputs: Sequence[Any],
    ) -> torch.Tensor | None:  # fmt: skip
        """Compute `spec.score(net, batch)` without waiting; None where it cannot be captured.

        Args:
            net: on the host.
            spec: of the model.
            batch: on the host.
            weights: arrays for parameters and buffers, in the net's order.
            inputs: arrays for the batch's tensors, and for the extra inputs.
        """
        watch = self._watches.get(id(net))
        if watch is None or watch.model is not net:
            watch = self._watches[id(net)] = python_state.PythonStateWatch(net, [spec.score])
        signature = (
            watch.state_id(), id(net),
            nested.signature(batch),
            tuple(tuple(tensor.shape) for tensor in extra_inputs.tensors()),
            tuple(module.training for module in net.modules()),
            tuple((buffer.shape, buffer.dtype) for buffer in weights[1]),
        )  # fmt: skip
        if signature not in self._functions:
            saved = python_snapshot.PythonSnapshot(net, watch.generators())
            self._functions[signature] = self._compile(saved, net, spec, batch, weights, inputs)
        function, ranges = self._functions[signature]
        if function is None:
            return None
        names, tensors = zip(*nested.named_tensors(batch), strict=True)
        ranges.refuse(tensors, names)
        self.stats += CompileStats(num_executions=1)
        return arrays.PendingTensor.from_array(function(weights, inputs))

    def _compile(
        self, saved: python_snapshot.PythonSnapshot, net: nn.Module, spec: Any, batch: Any,
        *arguments: Any,
    ) -> Any:  # fmt: skip
        start = time.perf_counter()
        try:
            graph = capture.capture_score(
                net, spec.score, batch, self._autocast, lowering.decompositions()
            )
            if saved.draws_random_numbers() or _draws(graph):
                raise RequestError("the model draws random numbers, which would be ever the same")
        except RequestError as error:
            log.warning(f"evaluation is torch's, on the host: {error}")
            return None, None
        finally:
            saved.keep_plain()

        def function(weights: Any, inputs: Any) -> Any:
            parameters, buffers = weights
            given = [*parameters, *buffers, *inputs]
            (score,) = lowering.run_graph(graph, given, None, self._rules)
            return score

        compiled = jax.jit(function).lower(*arguments).compile()
        self.stats += CompileStats(1, time.perf_counter() - start)
        with python_snapshot.restored(net):
            ranges = functional.trace_index_ranges(net, spec.score, batch, self._autocast)
        return compiled, ranges


def _draws(graph: torch.fx.GraphModule) -> bool:
    tag = torch.Tag.nondeterministic_seeded
    return any(tag in getattr(node.target, "tags", ()) for node in graph.graph.nodes)
