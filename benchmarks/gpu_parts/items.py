"""The items of a GPU's day: the command of each, its limit in seconds, and what it leaves."""

import dataclasses
import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from accbench.pjrt import gpu, nvidia
from accbench.recording import records
from accbench.report import summary
from benchmarks.gpu_parts import kernels
from benchmarks.gpu_parts.models import MODELS, TINY_MODELS, Model

_PROFILED = 5
_SAID = 30
# What engine jax does on a GPU beyond XLA's own ways; each alone switched off.
_SWITCHED_OFF = {
    "attention-by-xla": "--jax.attention=xla", "unaligned": "--jax.aligned_products=off",
}  # fmt: skip
# To find the kernel of each operation in a trace: a CUDA graph hides which one it belongs to.
_WITHOUT_GRAPHS = "--jax.flags=xla_gpu_enable_command_buffer="


@dataclasses.dataclass(frozen=True)
class Day:
    """What all items share."""

    state: Path
    """A folder with one folder an item."""
    device: str
    is_tiny: bool

    @property
    def models(self) -> dict[str, Model]:
        """Short name -> model."""
        return TINY_MODELS if self.is_tiny else MODELS

    @property
    def steps(self) -> tuple[int, int, int]:
        """Steps in all, of the warm-up, and of a window."""
        return (12, 4, 4) if self.is_tiny else (50, 10, 20)


Collect = Callable[[Path, str], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Item:
    """A row of the results: a command that ends in its time, and what is read from it."""

    name: str
    limit_s: float
    command: list[str]
    collect: Collect
    """Takes the item's folder and its output, and returns fields of the row."""
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    continues: bool = False
    """Whether it goes on in its folder, as a second call finds it."""
    statuses: tuple[int, ...] = (0,)
    """The exit statuses with which it leaves a result."""


def all_items(day: Day) -> list[Item]:
    """Return the day's items, what matters most first."""
    models = ("rn50", "gpt2", "vit")
    return [
        _module(day, "env", 90, "probe"),
        _module(day, "self-tests", 200, "self_tests"),
        _train(day, "rn50", "bfloat16", "ddp", 90),
        _train(day, "rn50", "bfloat16", "jax", 240),
        _train(day, "rn50", "bfloat16", "inductor", 180),
        _bare(day, "rn50", "eager", 60),
        _profile(day, "rn50", "jax", 240),
        _profile(day, "rn50", "ddp", 90),
        *(
            _train(day, model, "bfloat16", engine, limit)
            for model in models[1:]
            for engine, limit in (("ddp", 90), ("jax", 200), ("inductor", 180))
        ),
        *(
            _train(day, model, "bfloat16", "jax", 200, switched)
            for model, switched in (("vit", "attention-by-xla"), ("gpt2", "unaligned"))
        ),
        *(
            _train(day, "llama", "bfloat16", engine, limit)
            for engine, limit in (("ddp", 90), ("jax", 200), ("inductor", 180))
        ),
        _train(day, "rn50", "float16", "ddp", 90),
        _train(day, "rn50", "float16", "jax", 200),
        _compare(day, 240),
        _real_data(day, 120),
        _bare(day, "rn50", "compiled", 150),
        *(_bare(day, model, how, 150) for model in models[1:] for how in ("eager", "compiled")),
        _train(day, "rn50", "float16", "inductor", 150),
        *(
            _train(day, model, "float16", engine, 200)
            for model in models[1:]
            for engine in ("ddp", "jax", "inductor")
        ),
        *(_profile(day, model, engine, 240) for model in models[1:] for engine in ("jax", "ddp")),
    ]


def choose(items: list[Item], asked: str) -> list[Item]:
    """Return the items of these names, or beginnings of names, in the order asked for."""
    chosen: list[Item] = []
    for word in filter(None, (word.strip() for word in asked.split(","))):
        chosen += [item for item in items if item.name.startswith(word) and item not in chosen]
    return chosen if asked else items


def _module(day: Day, name: str, limit_s: float, module: str) -> Item:
    command = [sys.executable, "-m", f"benchmarks.gpu_parts.{module}", day.device]
    return Item(name, limit_s, command, last_json)


def train_flags(
    day: Day, model: Model, dtype: str, engine: str, folder: Path, steps: tuple[int, int, int]
) -> list[str]:
    """Return a worker's flags; the variable ACCBENCH_FLAGS_JAX and its like add an engine's."""
    return [
        f"--engine={engine}", f"--device={day.device}", f"--model={model.name}", *model.size,
        "--data=synthetic", "--amp_level=O1", f"--amp_dtype={dtype}",
        f"--batch_size={model.batch_size}", "--lr=1e-4", f"--max_steps={steps[0]}",
        f"--warmup_steps={steps[1]}", f"--log_interval={steps[2]}", "--eval_interval=0",
        "--save_interval=0", "--tensorboard=off", "--workers=0", f"--output_dir={folder}",
        *os.environ.get(f"ACCBENCH_FLAGS_{engine.upper()}", "").split(),
    ]  # fmt: skip


def _facts(model: Model, dtype: str, engine: str) -> dict[str, Any]:
    return {
        "model": model.name, "dtype": dtype, "engine": engine, "batch_size": model.batch_size,
    }  # fmt: skip


def _train(
    day: Day, key: str, dtype: str, engine: str, limit_s: float, switched: str | None = None
) -> Item:
    variant = "" if switched is None else f"-{switched}"
    name, model = f"{key}-{dtype}-{engine}{variant}", day.models[key]
    flags = train_flags(day, model, dtype, engine, day.state / name / "run", day.steps)
    flags += [] if switched is None else [_SWITCHED_OFF[switched]]
    # A worker alone, without a launcher's process and its imports before it.
    command = [sys.executable, "main.py", *flags]
    return Item(name, limit_s, command, of_run, _facts(model, dtype, f"{engine}{variant}"))


def _bare(day: Day, key: str, how: str, limit_s: float) -> Item:
    model, dtype = day.models[key], "bfloat16"
    command = [
        sys.executable, "-m", "benchmarks.gpu_parts.bare_loop", how, f"--model={model.name}",
        f"--device={day.device}", f"--amp_dtype={dtype}", f"--batch_size={model.batch_size}",
        *model.size, f"--warmup_steps={day.steps[1]}", f"--window={day.steps[2]}",
    ]  # fmt: skip
    facts = _facts(model, dtype, f"bare {how}")
    return Item(f"bare-{key}-{how}", limit_s, command, last_json, facts)


def _profile(day: Day, key: str, engine: str, limit_s: float) -> Item:
    name, model, dtype = f"profile-{key}-{engine}", day.models[key], "bfloat16"
    folder, warmup = day.state / name, day.steps[1]
    steps = (warmup + 2 * _PROFILED, warmup, 2)
    flags = train_flags(day, model, dtype, engine, folder / "run", steps)
    flags.append(f"--profile={_PROFILED}")
    env = {}
    if engine == "jax":  # from the cache XLA would not dump the program
        flags += ["--jax.compile_cache=off", *([_WITHOUT_GRAPHS] if day.device == "cuda" else [])]
        env["XLA_FLAGS"] = f"--xla_dump_to={folder / 'dump'} --xla_dump_hlo_as_text"
    collect = of_jax_profile if engine == "jax" else of_torch_profile
    command = [sys.executable, "main.py", *flags]
    return Item(name, limit_s, command, collect, _facts(model, dtype, engine), env)


def _real_data(day: Day, limit_s: float) -> Item:
    """Train on JPEG files through loading processes, under jax."""
    name, images = "jpeg-jax", day.state / "jpeg-jax" / "images"
    size, batch, workers = (32, 4, 0) if day.is_tiny else (128, 64, 4)
    model = Model("resnet18", batch, (f"--image_size={size}",))
    flags = train_flags(day, model, "bfloat16", "jax", day.state / name / "run", (20, 8, 4))
    flags += [f"--data=imagefolder:{images}", f"--workers={workers}", "--epochs=4"]
    make = [sys.executable, "-m", "accbench", "data", "mock", str(images)]
    both = f"{shlex.join(make)} && exec {shlex.join([sys.executable, 'main.py', *flags])}"
    return Item(name, limit_s, ["bash", "-c", both], of_run, _facts(model, "bfloat16", "jax"))


def _compare(day: Day, limit_s: float) -> Item:
    # In bfloat16 a small ResNet's rounding drowns the test of its gradients; a ViT's does not.
    size, batch = ("32", "8") if day.is_tiny else ("64", "64")
    steps = (9, 3, 3) if day.is_tiny else (40, 10, 10)
    command = [
        sys.executable, "-m", "accbench", "compare", "--engines=ddp,jax", f"--device={day.device}",
        "--model=vit_s_16", f"--image_size={size}", f"--batch_size={batch}", "--data=synthetic",
        "--amp_level=O1", "--amp_dtype=bfloat16", f"--max_steps={steps[0]}",
        f"--warmup_steps={steps[1]}", f"--log_interval={steps[2]}", "--repeats=2",
        "--numerics_steps=2", "--no-input_round", "--no-repeat_disturbed",
        f"--output_dir={day.state / 'compare' / 'out'}",
    ]  # fmt: skip
    # It ends with 1 where a row trains otherwise, or could not be judged: a result as well.
    return Item("compare", limit_s, command, of_comparison, continues=True, statuses=(0, 1))


def last_json(folder: Path, output: str) -> dict[str, Any]:
    """Return the last line of the output that is a JSON object."""
    del folder
    lines = [line for line in output.splitlines() if line.startswith("{")]
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def of_run(folder: Path, output: str) -> dict[str, Any]:
    """Return the numbers of a run's record."""
    del output
    found = records.read(folder / "run" / "records.jsonl")
    told = summary.summarize_records(folder.name, found)
    windows = [record for record in found if isinstance(record, records.WindowRecord)]
    steady = [window for window in windows if not window.warmup]
    num_steps = sum(window.num_steps for window in steady)
    return {
        "samples_per_s": told.samples_per_s, "step_ms": told.step_ms,
        "window_ms": [1e3 * w.wall_s / w.num_steps for w in steady],
        "host_ms": 1e3 * sum(w.dispatch_s for w in steady) / num_steps if num_steps else None,
        "data_ms": 1e3 * sum(w.data_wait_s for w in steady) / num_steps if num_steps else None,
        "compile_s": told.compile_s, "first_step_s": told.time_to_first_step_s,
        "peak_bytes": told.peak_memory_bytes, "warmup_peak_bytes": told.warmup_peak_memory_bytes,
        "tflop_per_s": told.tflop_per_s, "peak_share": told.peak_share,
        "losses": [window.loss for window in windows], "gpu_name": told.device,
        "fallbacks": told.num_fallbacks,
    }  # fmt: skip


def of_comparison(folder: Path, output: str) -> dict[str, Any]:
    """Return what the comparison says, and its page.

    Raises:
        FileNotFoundError: it ended before it wrote one.
    """
    pages = [*(folder / "out").glob("*.md")]
    if not pages:
        raise FileNotFoundError("the comparison left no page")
    return {"said": [line for line in output.splitlines() if line.strip()][-_SAID:],
            "page": pages[0].read_text().splitlines()}  # fmt: skip


def of_jax_profile(folder: Path, output: str) -> dict[str, Any]:
    """Return the kernels of jax's step, those that lose most against their bound first."""
    timed = kernels.of_jax(folder / "run" / "profile", _PROFILED)
    program = kernels.program_of(folder / "dump")
    if program is None:
        return {"kernels": ["XLA left no program", *kernels.plain_table(timed)]}
    gpu_name, spec = _gpu()
    rows = kernels.against_bounds(timed, program, spec)
    return {
        **of_run(folder, output), "device_ms": sum(one.ms for one in timed),
        "kernels": [
            f"{kernels.total(timed)}; bounds of {spec.name} on {gpu_name}",
            *kernels.table(kernels.by_kind(rows)), "", *kernels.table(rows),
        ],
    }  # fmt: skip


def of_torch_profile(folder: Path, output: str) -> dict[str, Any]:
    """Return the kernels of an eager step, the longest first."""
    timed = kernels.of_torch(folder / "run" / "profile", _PROFILED)
    return {
        **of_run(folder, output), "device_ms": sum(one.ms for one in timed),
        "kernels": [kernels.total(timed), *kernels.plain_table(timed)],
    }  # fmt: skip


def _gpu() -> tuple[str, gpu.GpuSpec]:
    """Return the GPU's name, and its data sheet, or an H100's where it has none."""
    shown = nvidia.driver().gpus
    name = shown[0].name if shown else "no GPU"
    for known in map(gpu.load, gpu.names()):
        if known.name == name:
            return name, known
    return name, gpu.load("h100")
