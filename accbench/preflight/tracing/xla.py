"""The training step as XLA is given it, for GPUs that are not here: `accbench preflight`.

`python -m accbench.preflight.tracing.xla FOLDER FLAGS` builds what a worker of such a run builds,
takes one step of the one training loop and ends when XLA, on the CPU, begins to compile it: what
it leaves, of the program before any optimisation, is told in `engines/tracing.py`. The device is
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
from accbench.distributed.process_group import Topology
from accbench.engines.common import source_location
from accbench.engines.xla import engine
from accbench.errors import RequestError
from accbench.pjrt import xla_flags
from accbench.preflight.tracing import module_scopes
from accbench.preflight.tracing import task as tracing
from accbench.system.gc_pause import pause_gc
from accbench.training import train_loop

NEEDS = ("torch_xla", "xla-cuda12")
"""A module, and the extra that has it."""


class AbsentGpu(engine.Engine):
    """The engine as on a GPU of a node that has them all, traced on the CPU."""

    in_sync = False
    """Whether the whole step is being handed to the device."""

    def _open_device(self) -> torch.device:
        device: torch.device = self.xla.device()
        return device

    def end_step(self) -> None:
        # A step that is recorded does not end here, but where its graph is compiled.
        self.in_sync = not self.replays
        super().end_step()
        self.in_sync = False

    @property
    def replays(self) -> bool:
        """Whether steps are recorded (`--xla.replay=on`), not traced one by one."""
        return self._replay is not None and self._replay.given_up is None

    @property
    def refused_to_record(self) -> str | None:
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


def environment(folder: Path, world_size: int) -> dict[str, str]:
    """What the tracing process must start with, for XLA reads it once."""
    flags = f"--xla_dump_to={_dump(folder)} --xla_dump_hlo_as_proto --xla_dump_hlo_module_re=.*"
    found = {
        "PJRT_DEVICE": "CPU",
        "TORCH_WARM_POOL": "0",
        "CUDA_VISIBLE_DEVICES": "",
        # Operations carry the module that they come from.
        "XLA_IR_DEBUG": "1",
        "XLA_HLO_DEBUG": "1",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip(),
    }
    # Or torch_xla leaves a lone process' all-reduce away.
    return {**found, "XLA_ALWAYS_ALLREDUCE": "1"} if world_size > 1 else found


def gpu_flags(task: TaskConfig) -> str:
    """XLA's flags that a run on the GPU has."""
    options = task.options.get("xla", engine.Engine.Options())
    return xla_flags.merge("cuda", options.flags)


def _dump(folder: Path) -> Path:
    return folder / "traced"


def main(argv: Sequence[str], rank: int = 0) -> int:
    """Trace; returns the exit status, and leaves the process by itself when it has the program.

    Args:
        rank: whose step it is; all are to have the same program.
    """
    return tracing.run(argv, partial(_trace, rank=rank))


def _trace(task: TaskConfig, folder: Path, rank: int) -> None:
    started = time.perf_counter()
    world_size = task.nproc_per_node
    here = Topology(rank, rank, world_size, world_size)
    with pause_gc():
        absent = AbsentGpu(task, task.options.get("xla", engine.Engine.Options()), here)
    source = tracing.source_of(task)
    spec, net = tracing.model_of(task, source.num_classes)
    model = absent.prepared(net)
    optimizer = absent.build_optimizer(model)
    absent.seed(task.seed)
    batch = next(iter(source.train_loader()))
    on_device = absent.to_device(batch)
    model.train()
    absent.xla.sync()
    absent.wait()
    facts = tracing.facts_of(net, batch, source.num_classes)
    done = {path.name for path in _programs(folder)}
    traced = time.perf_counter()

    def finish(program: bytes) -> None:
        if absent.replays and not absent.in_sync:
            return  # what a recording computes before it
        if not absent.in_sync:
            os._exit(tracing.failed(folder, _why_not_one(absent)))
        facts["trace_s"] = time.perf_counter() - traced
        facts["build_s"] = traced - started
        tracing.leave(folder, "hlo", program, facts)
        sys.stdout.flush()
        os._exit(0)

    threading.Thread(target=_watch, args=(folder, done, finish), daemon=True).start()
    with module_scopes.named(net):
        absent.run_step(train_loop.train_step, model, spec, optimizer, on_device)
    absent.wait()  # `finish` ends the process, unless there is nothing to compile
    if absent.refused_to_record is not None:
        raise RequestError(_why_not_one(absent))


def _why_not_one(absent: AbsentGpu) -> str:
    """Why a program was compiled before the step's end."""
    refused = absent.refused_to_record
    if refused is not None:
        return f"--xla.replay=on, but the step cannot be recorded: {refused}"
    frames = sys._current_frames()[threading.main_thread().ident or 0]
    place = source_location.find_model_line(traceback.extract_stack(frames))
    return (
        "the step is not one program: a value is needed on the host in its midst"
        f"{f' at {place}' if place else ''}; "
        f"{absent.compile_stats().num_fallbacks} operations left the compiler"
    )


def _programs(folder: Path) -> list[Path]:
    return sorted(_dump(folder).glob("*before_optimizations*.hlo.pb"))


def _watch(folder: Path, done: set[str], finish: Callable[[bytes], None]) -> None:
    """Call `finish` with each program that is not in `done`, once it is there as a whole."""
    while True:
        for path in _programs(folder):
            module = None if path.name in done else module_of(path.read_bytes())
            if module is not None:
                done.add(path.name)
                finish(module)
        time.sleep(0.02)


def module_of(hlo_proto: bytes) -> bytes | None:
    """The HloModuleProto in an HloProto, whose first field it is; None if the bytes are cut off."""
    at, module = 0, None
    while at < len(hlo_proto):
        key, at = _varint(hlo_proto, at)
        if key & 7 == 2:
            size, at = _varint(hlo_proto, at)
            module = hlo_proto[at : at + size] if module is None else module
            at += size
        elif key & 7 == 0:
            _, at = _varint(hlo_proto, at)
        else:
            return None
    return module if at == len(hlo_proto) else None


def _varint(proto: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(proto):
        value |= (proto[at] & 127) << shift
        shift += 7
        at += 1
        if proto[at - 1] < 128:
            return value, at
    return value, at + 1  # cut off: behind the end


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
