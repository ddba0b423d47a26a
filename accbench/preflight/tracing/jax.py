"""The JAX training step as XLA gets it, for GPUs that are not here: `accbench preflight`.

`python -m accbench.preflight.tracing.jax FOLDER FLAGS` captures what a worker of such a run
captures and lowers it for CUDA, without compiling it; `tracing/task.py` describes what it writes.
JAX's own devices are CPU devices, as many as the run has GPUs.
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
"""A required module, and the extra that installs it."""


class JaxTracingEngine(engine.Engine):
    """Engine jax of one worker among others, for all of which this process lowers the step."""

    def _start_cache(self) -> str:
        return "off: nothing is compiled"

    def _init_mesh(self) -> Any:
        from accbench.engines.jax import data_mesh

        return data_mesh.AbstractDataMesh(self.topology, self.options.shard)

    def lowered(self, model: Any, spec: Any, optimizer: Any, batch: Any) -> Any:
        """Lower the step to the form that JAX has before it compiles."""
        self._state_sync.sync_from_torch()
        arguments = self.step_arguments(optimizer, batch)
        function, _ = self._steps.build(model, spec, optimizer, batch, arguments[0])
        return function.trace(*arguments).lower(lowering_platforms=("cuda",))


def environment(folder: Path, world_size: int) -> dict[str, str]:
    """Return the environment variables that the tracing process must start with."""
    flags = f"--xla_force_host_platform_device_count={world_size}"
    return {
        "JAX_PLATFORMS": "cpu",
        "TORCH_WARM_POOL": "0",
        "CUDA_VISIBLE_DEVICES": "",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip(),
    }


def gpu_flags(task: TaskConfig) -> str:
    """Return the XLA flags that a run on the GPU has."""
    return xla_flags.merge("cuda", task.options.get("jax", engine.Engine.Options()).flags)


# Old enough for the plug-in of accbench.preflight (jaxlib 0.6.2 had 1.10), and new enough for
# gathers.
_STABLEHLO_VERSION = "1.8.0"


def _trace(task: TaskConfig, folder: Path) -> None:
    import jax

    # A plug-in reads the annotations of this partitioner whatever version of Shardy it has.
    jax.config.update("jax_use_shardy_partitioner", False)
    started = time.perf_counter()
    world_size = task.nproc_per_node
    topology = Topology(world_size=world_size, local_world_size=world_size)
    with pause_gc():
        tracing_engine = JaxTracingEngine(
            task, task.options.get("jax", engine.Engine.Options()), topology
        )
    source = tracing.build_source(task)
    spec, net = tracing.build_model(task, source.num_classes)
    model = tracing_engine.prepared(net)
    optimizer = tracing_engine.build_optimizer(model)
    tracing_engine.seed(task.seed)
    batch = next(iter(source.train_loader()))
    model.train()
    facts = tracing.model_facts(net, batch, source.num_classes)
    traced = time.perf_counter()
    program = _serialize(tracing_engine.lowered(model, spec, optimizer, batch))
    facts |= {"build_s": traced - started, "trace_s": time.perf_counter() - traced}
    tracing.write(folder, "mlir", program, facts)


def _serialize(lowered: Any) -> bytes:
    """Serialize a lowered step in a form that another version of XLA reads."""
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
    """Trace the step; returns the exit status."""
    return tracing.run(argv, _trace)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
