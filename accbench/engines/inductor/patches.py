"""Two faults of torch 2.8's inductor on a CPU, put right while this engine compiles.

They give wrong gradients or a broken heap without a word; torch 2.15 has neither. Nothing of
torch stays changed, and what is compiled so has entries of its own in torch's caches.

- A node whose loops are recomputed, to be fused with one of other loops, forgets what it waits
  for of what others write in place (`SchedulerNode.recompute_size_and_body`). It can be
  put before them: `dropout(inplace=True)` behind BatchNorm and a mean was multiplied before it was
  drawn, and of timm's TinyViT in channels_last no gradient came past the last mean over pixels.
- Loops fused by their outer dimensions hand values on in a local buffer, whose size is that of the
  tensor's last dimensions instead of the loop's (`CppScheduling.codegen_outer_loop_node`): a
  mean over pixels that keeps its dimensions, (N, C, 1, 1), before a LayerNorm of C gets room
  for one value and writes C. ConvNeXt ends so; it is seen in evaluation.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch

# Part of the key of torch's compile caches: code that was made without this is not taken from
# them, nor is this taken by others. To be raised with what is here.
_TAG = "accbench mends 3"


def are_needed() -> bool:
    """Whether this torch may have the faults."""
    version: Any = torch.__version__
    return bool(version < (2, 15))


@contextlib.contextmanager
def mended() -> Iterator[None]:
    """Compiling in here is without the faults."""
    from torch._inductor import scheduler
    from torch._inductor.codegen import cpp_utils

    node: Any = scheduler.SchedulerNode
    context: Any = cpp_utils.LocalBufferContext
    settings: Any = torch.compiler.config
    recompute, add = node.recompute_size_and_body, context.add_local_buffer

    def recompute_and_wait(self: Any, *args: Any, **kwargs: Any) -> None:
        waits_for = _waits_for(self)
        recompute(self, *args, **kwargs)
        _wait(self, *waits_for)

    def add_of_right_size(
        self: Any, local_buffer: Any, global_buffers: list[Any] | None = None
    ) -> None:
        # those of templates' matrix products have other names, and their right size
        if global_buffers and local_buffer.get_name().startswith("local_buffer_data"):
            _give_room(local_buffer, global_buffers)
        add(self, local_buffer, global_buffers)

    tag = settings.cache_key_tag
    tags = tag if _TAG in tag else f"{tag} {_TAG}".strip()
    node.recompute_size_and_body = recompute_and_wait
    context.add_local_buffer = add_of_right_size
    try:
        with settings.patch(cache_key_tag=tags):
            yield
    finally:
        node.recompute_size_and_body = recompute
        context.add_local_buffer = add


def _waits_for(node: Any) -> tuple[Any, dict[str, str]]:
    """What a node's own loops do not tell: (dependencies for order alone, renamed buffers).

    What was written in place has a new name among dependencies, and its old one in the loops.
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


def _wait(node: Any, for_order: Any, new_names: dict[str, str]) -> None:
    if for_order or new_names:
        node.set_read_writes(node.read_writes.rename(new_names).with_read(for_order))


def _give_room(local_buffer: Any, global_buffers: list[Any]) -> None:
    """As many elements as the inner loops of those that share the buffer write."""
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
