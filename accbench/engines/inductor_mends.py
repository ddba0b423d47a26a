"""Two faults of torch 2.8's inductor on a CPU, put right while this engine compiles.

They give wrong numbers or a broken heap without a word; torch 2.15 has neither. Nothing of
torch stays changed, and what is compiled so has entries of its own in torch's caches.

- Loops fused by their outer dimensions hand values on in a local buffer. Its size is taken from
  the last dimensions of the tensor instead of from the loop: a mean over pixels that keeps its
  dimensions, (N, C, 1, 1), before a LayerNorm of C gets room for one value and writes C
  (`CppScheduling.codegen_outer_loop_node`). ConvNeXt ends so; it is seen where nothing is
  kept for a backward pass.
- `aten.bernoulli.p`, of which `dropout(inplace=True)` is made, becomes a call that fills a buffer,
  and what reads the buffer can be put before it. Random numbers compared with p, as all
  other dropout is made of, are in order.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

# Part of the key of torch's compile caches: code that was made without this is not taken from
# them, nor is this taken by others. To be raised with what is here.
_TAG = "accbench mends 1"


def are_needed() -> bool:
    """Whether this torch may have the faults."""
    version: Any = torch.__version__
    return bool(version < (2, 15))


@contextlib.contextmanager
def mended() -> Iterator[None]:
    """Compiling in here is without the faults."""
    from torch._inductor.codegen import cpp_utils

    kind: Any = cpp_utils.LocalBufferContext
    settings: Any = torch.compiler.config
    add = kind.add_local_buffer

    def add_of_right_size(
        context: Any, local_buffer: Any, global_buffers: list[Any] | None = None
    ) -> None:
        # those of templates' matrix products have other names, and their right size
        if global_buffers and local_buffer.get_name().startswith("local_buffer_data"):
            _give_room(local_buffer, global_buffers)
        add(context, local_buffer, global_buffers)

    tag = settings.cache_key_tag
    tags = tag if _TAG in tag else f"{tag} {_TAG}".strip()
    kind.add_local_buffer = add_of_right_size
    try:
        with settings.patch(cache_key_tag=tags):
            yield
    finally:
        kind.add_local_buffer = add


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


def decompositions() -> dict[Any, Callable[..., Any]]:
    """What operations are made of, torch's own and these."""
    from torch._inductor import config
    from torch._inductor.decomposition import select_decomp_table

    table = dict(select_decomp_table())
    if not config.fallback_random:  # which asks for eager's own numbers
        table[torch.ops.aten.bernoulli.p] = _bernoulli
    return table


def _bernoulli(
    self: torch.Tensor, p: float = 0.5, generator: torch.Generator | None = None
) -> torch.Tensor:
    if generator is not None:
        return NotImplemented
    return (torch.rand_like(self, dtype=torch.float32) < p).to(self.dtype)
