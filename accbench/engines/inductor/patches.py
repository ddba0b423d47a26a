"""Patches for two faults of torch 2.8's inductor on a CPU, active while this engine compiles.

They give wrong gradients or corrupt the heap silently; torch 2.15 has neither. Nothing of torch
stays changed, and what is compiled with them has entries of its own in torch's caches.

- A node whose loops are recomputed, to be fused with a node of other loops, forgets its
  dependencies on in-place writes of others (`SchedulerNode.recompute_size_and_body`). It can be
  scheduled before them: `dropout(inplace=True)` behind BatchNorm and a mean was multiplied before
  it was drawn, and in timm's TinyViT in channels_last no gradient passed the last mean over pixels.
- Loops fused by their outer dimensions pass values on in a local buffer, whose size is that of the
  tensor's last dimensions instead of the loop's (`CppScheduling.codegen_outer_loop_node`): a
  mean over pixels that keeps its dimensions, (N, C, 1, 1), before a LayerNorm of C gets a buffer
  for one value and writes C. ConvNeXt ends so; it happens in evaluation.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch

# Part of the key of torch's compile caches: separates code compiled with these patches from code
# compiled without. Raise the number with every change here.
_TAG = "accbench mends 3"


def needed() -> bool:
    """Return whether this torch may have the faults."""
    version: Any = torch.__version__
    return bool(version < (2, 15))


@contextlib.contextmanager
def applied() -> Iterator[None]:
    """Apply the patches in the block."""
    from torch._inductor import scheduler
    from torch._inductor.codegen import cpp_utils

    node: Any = scheduler.SchedulerNode
    context: Any = cpp_utils.LocalBufferContext
    settings: Any = torch.compiler.config
    recompute, add = node.recompute_size_and_body, context.add_local_buffer

    def recompute_with_dependencies(self: Any, *args: Any, **kwargs: Any) -> None:
        hidden = _hidden_dependencies(self)
        recompute(self, *args, **kwargs)
        _add_dependencies(self, *hidden)

    def add_of_right_size(
        self: Any, local_buffer: Any, global_buffers: list[Any] | None = None
    ) -> None:
        # Buffers of matrix-product templates have other names, and the right size.
        if global_buffers and local_buffer.get_name().startswith("local_buffer_data"):
            _enlarge(local_buffer, global_buffers)
        add(self, local_buffer, global_buffers)

    tag = settings.cache_key_tag
    tags = tag if _TAG in tag else f"{tag} {_TAG}".strip()
    node.recompute_size_and_body = recompute_with_dependencies
    context.add_local_buffer = add_of_right_size
    try:
        with settings.patch(cache_key_tag=tags):
            yield
    finally:
        node.recompute_size_and_body = recompute
        context.add_local_buffer = add


def _hidden_dependencies(node: Any) -> tuple[Any, dict[str, str]]:
    """Return the dependencies that a node's own loops do not show.

    What was written in place has a new name among dependencies, and its old one in the loops.

    Returns:
        Dependencies for order alone, and new names of buffers by their old ones.
    """
    from torch._inductor import dependencies
    from torch.utils._ordered_set import OrderedSet

    reads = node.read_writes.reads
    stars = [dep for dep in reads if isinstance(dep, dependencies.StarDep)]
    weak = [d for d in node.unmet_dependencies if isinstance(d, dependencies.WeakDep)]
    real_names = node.scheduler.mutation_real_name
    new_names = {
        real_names[dep.name]: dep.name
        for dep in reads
        if dep.name in real_names and not isinstance(dep, dependencies.WeakDep)
    }
    return OrderedSet([*stars, *weak]), new_names


def _add_dependencies(node: Any, for_order: Any, new_names: dict[str, str]) -> None:
    if for_order or new_names:
        node.set_read_writes(node.read_writes.rename(new_names).with_read(for_order))


def _enlarge(local_buffer: Any, global_buffers: list[Any]) -> None:
    """Enlarge a local buffer to what the inner loops that share it write."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    layout = local_buffer.get_layout()
    num_inner = len(layout.size)
    for buffer in global_buffers:
        node: Any = V.graph.scheduler.name_to_buf[buffer.get_name()].defining_op
        group, reduction_group = max(node.get_nodes(), key=lambda n: n.is_reduction()).group[1]
        ranges = (*group, *reduction_group)[-num_inner:]
        if V.graph.sizevars.statically_known_leq(math.prod(ranges), math.prod(layout.size)):
            continue
        strides = [math.prod(ranges[index + 1 :]) for index in range(len(ranges))]
        layout = ir.FixedLayout(layout.device, layout.dtype, list(ranges), strides)
    local_buffer.layout = layout
