"""The training step as torch_xla gives it to XLA, for GPUs that are not here: `accbench preflight`.

`python -m accbench.preflight.tracing.xla FOLDER FLAGS` builds what a worker of such a run builds,
takes one step of the one training loop and ends when XLA, on the CPU, begins to compile it:
`tracing/process.py` describes what it writes of the program before any optimisation. The device is
the CPU's, everything else as for the GPU: flags, autocast, the scaler, the reduction in the graph.
The step itself is not computed.
"""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accbench.config import TaskConfig
from accbench.engines.common import source_location
from accbench.engines.xla import engine
from accbench.errors import RequestError
from accbench.preflight.tracing import module_scopes, process
from accbench.training import train_loop

NEEDS = ("torch_xla", "xla-cuda12")
"""A required module, and the extra that installs it."""


class XlaTracingEngine(engine.Engine):
    """Engine xla as on a GPU of a complete node, traced on the CPU."""

    in_sync = False
    """Whether the whole step is being handed to the device."""

    def _open_device(self) -> torch.device:
        device: torch.device = self.xla.device()
        return device

    def end_step(self) -> None:
        # A recorded step ends where its graph is compiled, and not here.
        self.in_sync = not self.replays
        super().end_step()
        self.in_sync = False

    @property
    def replays(self) -> bool:
        """Whether steps are recorded (`--xla.replay=on`), not traced one by one."""
        return self._replay is not None and self._replay.given_up is None

    @property
    def why_not_recorded(self) -> str | None:
        """Why steps are traced although recording was asked for."""
        return None if self._replay is None else self._replay.given_up

    def _check_calls(self, model: nn.Module) -> None:
        """Check nothing: there are no values here to try a call on."""

    def _start_replay(self) -> Any | None:
        replay = super()._start_replay()
        if replay is not None:
            compile_graph = replay.recorder.compile_graph

            def compile_step(roots: list[torch.Tensor]) -> None:
                self.in_sync = True
                compile_graph(roots)
                self.in_sync = False

            replay.recorder.compile_graph = compile_step
        return replay


def environment(folder: Path, world_size: int, compute_capability: str) -> dict[str, str]:
    """Return the environment variables that the tracing process must start with."""
    del compute_capability  # the step is the same for every GPU
    dump = f"--xla_dump_to={_dump(folder)} --xla_dump_hlo_as_proto --xla_dump_hlo_module_re=.*"
    variables = {
        **process.environment(dump),
        "PJRT_DEVICE": "CPU",
        # Operations carry the module that they come from.
        "XLA_IR_DEBUG": "1",
        "XLA_HLO_DEBUG": "1",
    }
    # Without it torch_xla omits the all-reduce of a single process.
    return {**variables, "XLA_ALWAYS_ALLREDUCE": "1"} if world_size > 1 else variables


def _dump(folder: Path) -> Path:
    return folder / "traced"


def main(argv: Sequence[str], rank: int = 0) -> int:
    """Trace the step; returns the exit status, or ends the process once it has the program.

    Args:
        argv: FOLDER FLAGS.
        rank: whose step it is; all ranks are to have the same program.
    """
    return process.run(argv, partial(_trace, rank=rank))


def _trace(task: TaskConfig, folder: Path, rank: int) -> None:
    traced = process.build(task, XlaTracingEngine, rank)
    tracing_engine, facts = traced.engine, traced.facts
    on_device = tracing_engine.to_device(traced.batch)
    tracing_engine.xla.sync()
    tracing_engine.wait()
    known_programs = {path.name for path in _programs(folder)}
    started = time.perf_counter()

    def finish(program: bytes) -> None:
        if tracing_engine.replays and not tracing_engine.in_sync:
            return  # computed before a recording
        if not tracing_engine.in_sync:
            os._exit(process.report_failure(folder, _why_incomplete(tracing_engine)))
        facts["trace_s"] = time.perf_counter() - started
        process.write(folder, "hlo", program, facts)
        sys.stdout.flush()
        os._exit(0)

    threading.Thread(target=_watch, args=(folder, known_programs, finish), daemon=True).start()
    with module_scopes.name_operations(traced.net):
        tracing_engine.run_step(
            train_loop.train_step, traced.model, traced.spec, traced.optimizer, on_device
        )
    tracing_engine.wait()  # `finish` ends the process, unless there is nothing to compile
    if tracing_engine.why_not_recorded is not None:
        raise RequestError(_why_incomplete(tracing_engine))


def _why_incomplete(tracing_engine: XlaTracingEngine) -> str:
    """Return why a program was compiled before the step's end."""
    refused = tracing_engine.why_not_recorded
    if refused is not None:
        return f"--xla.replay=on, but the step cannot be recorded: {refused}"
    frames = sys._current_frames()[threading.main_thread().ident or 0]
    line = source_location.find_model_line(traceback.extract_stack(frames))
    return (
        "the step is not one program: a value is needed on the host in its midst"
        f"{f' at {line}' if line else ''}; "
        f"{tracing_engine.compile_stats().num_fallbacks} operations left the compiler"
    )


def _programs(folder: Path) -> list[Path]:
    return sorted(_dump(folder).glob("*before_optimizations*.hlo.pb"))


def _watch(folder: Path, known_programs: set[str], finish: Callable[[bytes], None]) -> None:
    """Call `finish` with each complete program that is not in `known_programs`."""
    while True:
        for path in _programs(folder):
            module = None if path.name in known_programs else extract_module(path.read_bytes())
            if module is not None:
                known_programs.add(path.name)
                finish(module)
        time.sleep(0.02)


def extract_module(hlo_proto: bytes) -> bytes | None:
    """Return an HloProto's HloModuleProto, its first field; None if the bytes are cut off."""
    position, module = 0, None
    while position < len(hlo_proto):
        key, position = _varint(hlo_proto, position)
        if key & 7 == 2:
            size, position = _varint(hlo_proto, position)
            module = hlo_proto[position : position + size] if module is None else module
            position += size
        elif key & 7 == 0:
            _, position = _varint(hlo_proto, position)
        else:
            return None
    return module if position == len(hlo_proto) else None


def _varint(proto: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while position < len(proto):
        value |= (proto[position] & 127) << shift
        shift += 7
        position += 1
        if proto[position - 1] < 128:
            return value, position
    return value, position + 1  # cut off: behind the end


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
