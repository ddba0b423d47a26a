"""ATen operations of captured graphs on jax arrays: a table, and what runs graphs by it.

`decompositions()` says what torch's capture is to take apart, `run_graph` runs what it captured,
and `lowering` adds an operation to the table.
"""

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
    """For aot_export_module: torch's decompositions of all that the table doesn't keep whole.

    Those of core ATen first, then what else torch can take apart.
    """
    import torch

    from accbench.engines.common import decompositions as of_torch

    kept = set(operations())
    known = dict(torch._decomp.decomposition_table)
    known.update(torch._decomp.core_aten_decompositions().items())
    known.update(of_torch.corrected())
    taken_apart = {op: rule for op, rule in known.items() if str(op) not in kept}
    return {**taken_apart, **of_torch.for_complex()}
