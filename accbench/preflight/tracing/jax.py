"""The training step as XLA is given it, for GPUs that are not here: `accbench preflight`.

`python -m accbench.preflight.tracing.jax FOLDER FLAGS` captures what a worker of such a run
captures and lowers it for CUDA, all but compiled; what it leaves is told in `tracing/task.py`.
JAX's own devices are the CPU's, as many as there are to be GPUs.
"""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accbench.config import TaskConfig
from accbench.distributed.process_group import Topology
from accbench.engines.jax import engine
from accbench.pjrt import xla_flags
from accbench.preflight.tracing import task as tracing
from accbench.system.gc_pause import pause_gc

NEEDS = ("jax", "jax")
"""A module, and the extra that has it."""


class AbsentGpus(engine.Engine):
    """The engine of a worker among others, all of which this process lowers for."""

    def _start_cache(self) -> str:
        return "off: nothing is compiled"

    def _meet(self) -> Any:
        from accbench.engines.jax import data_mesh

        return data_mesh.AbstractDataMesh(self.topology, self.options.shard)

    def lowered(self, model: Any, spec: Any, optimizer: Any, batch: Any) -> Any:
        """The step, as JAX has it before it is compiled."""
        self._mirror.sync_from_torch()
        arguments = self._arguments(optimizer, batch)
        function, _ = self._function(model, spec, optimizer, batch)
        return function.trace(*arguments).lower(lowering_platforms=("cuda",))


def environment(folder: Path, world_size: int) -> dict[str, str]:
    """What the tracing process must start with."""
    flags = f"--xla_force_host_platform_device_count={world_size}"
    return {
        "JAX_PLATFORMS": "cpu",
        "TORCH_WARM_POOL": "0",
        "CUDA_VISIBLE_DEVICES": "",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip(),
    }


def gpu_flags(task: TaskConfig) -> str:
    """XLA's flags that a run on the GPU has."""
    return xla_flags.merge("cuda", task.options.get("jax", engine.Engine.Options()).flags)


# What the plug-in of accbench.preflight reads (jaxlib 0.6.2 had 1.10), and gathers need.
_STABLEHLO_VERSION = "1.8.0"


def _trace(task: TaskConfig, folder: Path) -> None:
    import jax

    # A plug-in reads this one's annotations whatever version of Shardy it has.
    jax.config.update("jax_use_shardy_partitioner", False)
    started = time.perf_counter()
    world_size = task.nproc_per_node
    here = Topology(world_size=world_size, local_world_size=world_size)
    with pause_gc():
        absent = AbsentGpus(task, task.options.get("jax", engine.Engine.Options()), here)
    source = tracing.source_of(task)
    spec, net = tracing.model_of(task, source.num_classes)
    model = absent.prepared(net)
    optimizer = absent.build_optimizer(model)
    absent.seed(task.seed)
    batch = next(iter(source.train_loader()))
    model.train()
    facts = tracing.facts_of(net, batch, source.num_classes)
    traced = time.perf_counter()
    program = _portable(absent.lowered(model, spec, optimizer, batch))
    facts |= {"build_s": traced - started, "trace_s": time.perf_counter() - traced}
    tracing.leave(folder, "mlir", program, facts)


def _portable(lowered: Any) -> bytes:
    """As another version of XLA reads it."""
    from jaxlib.mlir import passmanager
    from jaxlib.mlir.dialects import stablehlo

    module = lowered.compiler_ir("stablehlo")
    stablehlo.register_stablehlo_passes()
    with module.context:
        passes = passmanager.PassManager.parse(
            "builtin.module(func.func(chlo-legalize-to-stablehlo))"
        )
        passes.run(module.operation)
        program: bytes = stablehlo.serialize_portable_artifact(module, _STABLEHLO_VERSION)
    return program


def main(argv: Sequence[str]) -> int:
    """Trace; returns the exit status."""
    return tracing.run(argv, _trace)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
