"""The JAX training step as XLA gets it, for GPUs that are not here: `accbench preflight`.

`python -m accbench.preflight.tracing.jax FOLDER FLAGS` captures what a worker of such a run
captures and lowers it for CUDA, without compiling it; `tracing/process.py` describes what it
writes. JAX's own devices are CPU devices, as many as the run has GPUs.
"""

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from accbench.config import TaskConfig
from accbench.engines.jax import engine, functional
from accbench.preflight.tracing import process

NEEDS = ("jax", "jax")
"""A required module, and the extra that installs it."""

# Environment variable of the tracing process: the compute capability of the GPU in question.
_CAPABILITY = "ACCBENCH_PREFLIGHT_CAPABILITY"


class JaxTracingEngine(engine.Engine):
    """Engine jax of one worker among others, for all of which this process lowers the step."""

    def _start_cache(self) -> str:
        return "off: nothing is compiled"

    def _init_mesh(self) -> Any:
        from accbench.engines.jax import data_mesh

        return data_mesh.AbstractDataMesh(
            self.topology, self.mesh.shard > 1, self.mesh.tp, self.mesh.cp
        )

    def _compute_capability(self) -> str | None:
        return os.environ.get(_CAPABILITY)

    def _tensor_group(self) -> Any:
        from accbench.distributed.collectives import RankGroup

        return RankGroup("", 0, self.mesh.tp)

    def lowered(self, model: Any, spec: Any, optimizer: Any, batch: Any) -> Any:
        """Lower the step to the form that JAX has before it compiles."""
        self._state_sync.sync_from_torch()
        arguments = self.step_arguments(optimizer, batch)
        function, _ = self._steps.build(model, spec, optimizer, batch, arguments[0])
        with _cudnn_assumed():
            return function.trace(*arguments).lower(lowering_platforms=("cuda",))


@contextlib.contextmanager
def _cudnn_assumed() -> Iterator[None]:
    """Have JAX trace cuDNN's attention where there is no cuDNN, in the block."""
    from jax._src.cudnn import fused_attention_stablehlo as attention

    check = attention.check_cudnn_version
    attention.check_cudnn_version = lambda: _CUDNN_VERSION
    try:
        yield
    finally:
        attention.check_cudnn_version = check


# As `cudnnGetVersion` gives it; JAX asks for 8.9 at least.
_CUDNN_VERSION = 91000


def environment(folder: Path, world_size: int, compute_capability: str) -> dict[str, str]:
    """Return the environment variables that the tracing process must start with."""
    num_devices = f"--xla_force_host_platform_device_count={world_size}"
    variables = {"JAX_PLATFORMS": "cpu", _CAPABILITY: compute_capability}
    return {**process.environment(num_devices), **variables}


# Old enough for the plug-in of accbench.preflight (jaxlib 0.6.2 had 1.10), and new enough for
# gathers.
_STABLEHLO_VERSION = "1.8.0"


def _trace(task: TaskConfig, folder: Path) -> None:
    import jax

    # A plug-in reads the annotations of this partitioner whatever version of Shardy it has.
    jax.config.update("jax_use_shardy_partitioner", False)
    traced = process.build(task, JaxTracingEngine, without_memory=functional.fake_mode)
    started = time.perf_counter()
    program = _serialize(
        traced.engine.lowered(traced.model, traced.spec, traced.optimizer, traced.batch)
    )
    facts = {**traced.facts, "trace_s": time.perf_counter() - started}
    process.write(folder, "mlir", program, facts)


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
    return process.run(argv, _trace)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
