"""The compiler's counts of a process, from torch_xla's metrics."""

from collections.abc import Collection

from accbench.engines import CompileStats


def compile_stats(allowed_fallbacks: Collection[str] = ()) -> CompileStats:
    """Return what torch_xla compiled and ran since the process started.

    Args:
        allowed_fallbacks: operations (`aten::NAME`) on the host that do not count.
    """
    import torch_xla.debug.metrics as xla_metrics

    num_compiles, compile_ns, _ = xla_metrics.metric_data("CompileTime") or (0, 0.0, None)
    num_executions, _, _ = xla_metrics.metric_data("ExecuteTime") or (0, 0.0, None)
    fallbacks = [
        name
        for name in xla_metrics.counter_names()
        if name.startswith("aten::") and name not in allowed_fallbacks
    ]
    return CompileStats(
        num_compiles=num_compiles,
        compile_s=compile_ns / 1e9,
        num_executions=num_executions,
        num_fallbacks=sum(xla_metrics.counter_value(name) or 0 for name in fallbacks),
    )
