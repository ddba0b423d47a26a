"""A table of ATen operations on jax arrays, and an interpreter of captured graphs.

`decompositions()` tells torch's capture what to take apart, `run_graph` runs what it captured,
and `lowering` adds an operation to the table.
"""

from functools import lru_cache
from typing import Any

from accbench.engines.jax.lowering.context import Context, Rules
from accbench.engines.jax.lowering.dtypes import jax_dtype, to_jax
from accbench.engines.jax.lowering.run import missing, run_graph
from accbench.engines.jax.lowering.table import lowering, operations

__all__ = [
    "Context",
    "Rules",
    "decompositions",
    "jax_dtype",
    "lowering",
    "missing",
    "operations",
    "run_graph",
    "to_jax",
]


def decompositions() -> dict[Any, Any]:
    """Return torch's decompositions of all operations that are not in the table.

    They are for `aot_export_module`: those of core ATen first, then torch's others.
    """
    import torch

    from accbench.engines.common import decompositions as torch_decompositions

    lowered = set(operations())
    rules = dict(torch._decomp.decomposition_table)
    composites = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
    rules.update(_of_core_aten(tuple(composites), tuple(rules.values())))
    rules.update(torch_decompositions.corrected())
    decomposed = {op: rule for op, rule in rules.items() if str(op) not in lowered}
    return {**decomposed, **torch_decompositions.for_complex()}


@lru_cache(maxsize=1)  # torch looks through all operations of all packages for it, each time
def _of_core_aten(composites: tuple[str, ...], rules: tuple[Any, ...]) -> dict[Any, Any]:
    """Return torch's decompositions to core ATen, which follow from what packages registered."""
    import torch

    return dict(torch._decomp.core_aten_decompositions().items())
