"""Numerics passes of many engines in one process a rank, and their verdicts.

    python -m tests.comparing.trials FOLDER NAME SEEDS ENGINES   (JSON; what `start_setting` starts)

What `benchmarks/numerics_trials.py` does at length and the tests do in small.
"""

import dataclasses
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from tests import planted
from tests.conftest import ROOT, start_ranks

STEPS = 20
FLOORS = ("ddp", "ddp:no-channels_last")
# These need a process of their own: torch_xla has to be there before anything is differentiated.
APART = ("xla", "xla:lean", "inductor", "jax", "jax:lean")


@dataclasses.dataclass(frozen=True)
class Setting:
    """Flags of a run, and which faults mean something in it."""

    flags: tuple[str, ...]
    num_workers: int = 1
    faults: tuple[str, ...] = ()


def flags_of(
    model: str, px: int, batch: int, amp: str = "O0", steps: int = STEPS
) -> tuple[str, ...]:
    dtype = () if amp == "O0" else (f"--amp_dtype={amp}",)
    level = "O0" if amp == "O0" else "O1"
    return (
        f"--model={model}", f"--image_size={px}", f"--batch_size={batch}", f"--amp_level={level}",
        *dtype, "--lr=1e-4", "--workers=0", "--threads=1", "--device=cpu", "--data=synthetic",
        "--synthetic.num_classes=10", f"--synthetic.num_batches={steps}",
        f"--max_steps={steps}", "--timeout_s=300",
    )  # fmt: skip


# All at once that a recipe may ask for.
_RECIPE = (
    "--decay=matrices", "--weight_decay=0.1", "--clip_norm=0.1", "--accumulate=2",
    "--ema_decay=0.9", "--label_smoothing=0.1", "--mixup=0.2", "--cutmix=1",
)  # fmt: skip
_SGD = (*_RECIPE, "--optimizer=sgd", "--nesterov", "--lr=0.05")


def of_sequences(model: str, seq_len: int, px: int, amp: str = "O0") -> Setting:
    """Four steps of what has no images: text, and videos."""
    sizes = (f"--seq_len={seq_len}", "--synthetic.num_classes=64")
    return Setting((*flags_of(model, px, 4, amp, steps=4), *sizes))


SEQUENCES = {"gpt2_tiny": 32, "bert_tiny": 32, "llama_tiny": 32, "lstm_tiny": 8, "convlstm_tiny": 1}
_ONE, _NETS = tuple(planted.ALWAYS), tuple(planted.OF_CONVOLUTIONS)
_DROPS = tuple(name for name in planted.OF_DROPOUT)
_RANKS = tuple(name for name in planted.OF_RANKS if name != "drops_the_same_on_all")
SETTINGS = {
    # What the tests run: eight steps of small networks.
    "tests": Setting(
        flags_of("tests.nets:dropping", 32, 8, steps=8), 1, _ONE + _NETS + _DROPS
    ),
    "tests, tied": Setting(flags_of("tests.nets:tied", 32, 8, steps=4), 1),
    "tests, transformer": Setting(flags_of("tests.nets:transformer", 32, 8, steps=4), 1, _DROPS),
    "tests, two workers": Setting(
        flags_of("tests.nets:dropping", 32, 8, steps=4), 2, tuple(planted.OF_RANKS)
    ),
    "tests, sgd": Setting(
        (*flags_of("tests.nets:dropping", 32, 8, steps=4), *_SGD), 1,
        (*planted.OF_RECIPES, *planted.OF_SGD, "rate_off", "skips_third"),
    ),
    "tests, adamw, two workers": Setting(
        (*flags_of("tests.nets:dropping", 32, 8, steps=4), *_RECIPE), 2,
        (*planted.OF_RECIPES, "not_averaged"),
    ),
    "tests, text": of_sequences("lstm_tiny", 8, 32),
    # As a GPU would get them.
    "lean, convolutions": Setting(flags_of("resnet10", 96, 8, "bfloat16", steps=4), 1),
    "lean, transformer": Setting(flags_of("tests.nets:transformer", 32, 8, "float16", steps=4), 1),
    "32 px, batch 2": Setting(flags_of("resnet10", 32, 2), 1, _ONE + _NETS),
    "96 px, batch 4": Setting(flags_of("resnet10", 96, 4), 1, _ONE + _NETS),
    "96 px, bfloat16": Setting(flags_of("resnet10", 96, 4, "bfloat16"), 1, _ONE + _NETS),
    "dropout": Setting(flags_of("tests.nets:dropping", 32, 8), 1, _ONE + _NETS + _DROPS),
    "transformer": Setting(flags_of("tests.nets:transformer", 32, 8), 1, _ONE + _DROPS),
    "transformer, bfloat16": Setting(
        flags_of("tests.nets:transformer", 32, 8, "bfloat16"), 1, _ONE + _DROPS
    ),
    "tied": Setting(flags_of("tests.nets:tied", 32, 8), 1, _ONE),
    "two workers": Setting(flags_of("resnet10", 64, 4), 2, _RANKS + ("times_0_9", "stale")),
    "two workers, bfloat16": Setting(
        flags_of("resnet10", 64, 4, "bfloat16"), 2, _RANKS + ("times_0_9",)
    ),
    "two workers, dropout": Setting(
        flags_of("tests.nets:dropping", 32, 8), 2, tuple(planted.OF_RANKS) + _DROPS
    ),
    **{name: of_sequences(name, length, 16) for name, length in SEQUENCES.items()},
    **{
        f"{name}, bfloat16": of_sequences(name, length, 16, "bfloat16")
        for name, length in SEQUENCES.items()
    },
}  # fmt: skip

# Of every kind that people train, ten steps: benchmarks/named_models.py.
NAMED = {
    "resnet18": ("resnet18", 96), "resnet50": ("resnet50", 96), "vit_ti_16": ("vit_ti_16", 64),
    "convnext_tiny": ("torchvision:convnext_tiny", 64),
    "mobilenet_v3_small": ("torchvision:mobilenet_v3_small", 96),
    "gpt2_tiny": ("gpt2_tiny", 16), "bert_tiny": ("bert_tiny", 16),
    # Residual branches begin at zero: in 16 bits torchvision's, which don't, are no sharp test.
    "timm:resnet18": ("timm:resnet18", 96), "timm:resnet50": ("timm:resnet50", 96),
}  # fmt: skip


def named(model: str, dtype: str, num_workers: int) -> str:
    """The name of a setting, which is among `SETTINGS` from here on."""
    name = f"{model} {dtype} {num_workers}"
    full_name, px = NAMED[model]
    amp = "O0" if dtype == "float32" else dtype
    flags = flags_of(full_name, px, 8, amp, steps=10)
    if model in SEQUENCES:
        flags = (*flags, f"--seq_len={SEQUENCES[model]}", "--synthetic.num_classes=64")
    SETTINGS[name] = Setting(flags, num_workers)
    return name


for _model in NAMED:
    for _dtype in ("float32", "bfloat16"):
        for _num in (1, 2):
            named(_model, _dtype, _num)


def folder_of(base: Path, setting: str, seed: int, engine: str) -> Path:
    name = setting.replace(" ", "-").replace(",", "")
    return base / name / str(seed) / engine.replace(":", "-")


def run_setting(base: Path, name: str, seeds: list[int], engines: list[str], rank: int) -> None:
    """In a rank's process: the passes of a setting, one after the other."""
    from accbench.training import process_group
    from accbench.training.process_group import Topology

    num_workers = SETTINGS[name].num_workers
    topology = Topology(rank, rank, num_workers, num_workers)
    process_group.start(topology, "cpu", 300)
    for seed in seeds:
        _run_seed(base, name, seed, engines, topology)
    process_group.close()


def _run_seed(base: Path, name: str, seed: int, engines: list[str], topology: Any) -> None:
    from accbench import plugins
    from accbench.comparing import numerics, reference, roundings
    from accbench.training import process_group

    num_workers, rank = SETTINGS[name].num_workers, topology.rank
    at = folder_of(base, name, seed, "reference")
    if rank == 0 and not (at / reference.FOLDER).exists():
        numerics.make_reference(_task(name, seed, "ddp", at, topology), num_workers)
    process_group.from_rank0(0)
    for engine in engines:
        folder = folder_of(base, name, seed, engine)
        if process_group.from_rank0(int(folder.exists())):
            continue
        plugins.load("engines", engine.partition(":")[0])
        if engine == "inductor":
            import torch._dynamo

            torch._dynamo.reset()  # or after eight of them a forward is compiled no more
        started = time.perf_counter()
        try:
            num_draws = roundings.NUM_DRAWS if engine in FLOORS else 0
            task = _task(name, seed, engine, folder, topology)
            numerics.check(task, topology, at, num_draws)
        except Exception:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"error{rank}.txt").write_text(traceback.format_exc())
            if num_workers > 1:
                raise  # the other rank waits for this one
        if rank == 0:
            print(f"{name} {seed} {engine}: {time.perf_counter() - started:.1f} s", flush=True)


def _task(name: str, seed: int, engine: str, folder: Path, topology: Any) -> Any:
    from accbench import config, resolving
    from accbench.training import worker

    setting = SETTINGS[name]
    kind, _, option = engine.partition(":")
    lean = [f"--{kind}.lean=on", *(["--xla.replay=off"] if kind == "xla" else [])]  # as on a GPU
    variant = {"no-channels_last": ["--ddp.no-channels_last"], "lean": lean}
    task = resolving.resolve(
        config.parse(
            [*setting.flags, f"--seed={seed}", f"--nproc_per_node={setting.num_workers}",
             f"--engine={kind}", *variant.get(option, ()), f"--output_dir={folder}"]
        )
    )  # fmt: skip
    worker.apply_environment(task, topology)
    return task


def start_setting(
    base: Path, name: str, seeds: list[int], engines: list[str], plugins: Path
) -> None:
    """A process a rank; engines that need one have processes of their own."""
    together = [engine for engine in engines if engine not in APART]
    groups = [list(dict.fromkeys([*FLOORS, *together]))]
    for group in (*groups, *([engine] for engine in engines if engine in APART)):
        _start(base, name, seeds, group, plugins)


def _start(base: Path, name: str, seeds: list[int], engines: list[str], plugins: Path) -> None:
    env = {
        "PYTHONPATH": os.pathsep.join((str(plugins), str(ROOT))),
        "PJRT_DEVICE": "CPU", "NPROC": "1", "TORCH_WARM_POOL": "0",
    }  # fmt: skip
    what = [str(base), name, json.dumps(seeds), json.dumps(engines)]
    num_ranks = SETTINGS[name].num_workers
    for process in start_ranks(num_ranks, "-m", "tests.comparing.trials", *what, **env):
        process.wait()
        out, err = process.end()
        sys.stdout.write(out)
        sys.stderr.write(err)


def judge(base: Path, name: str, seed: int, engine: str):
    """The verdict of a pass, as a comparison would give it."""
    from accbench.report import numerics
    from accbench.report import run as runs

    def run(which: str):
        return runs.read_if_there(folder_of(base, name, seed, which))

    floors = (run("ddp"), run("ddp:no-channels_last"))
    if engine == "ddp":  # beside another start of itself
        engine = "ddp:again"
    return numerics.judge_run(run(engine), run("reference"), floors)


if __name__ == "__main__":
    _base, _name, _seeds, _engines = sys.argv[1:]
    _rank = int(os.environ["RANK"])
    run_setting(Path(_base), _name, json.loads(_seeds), json.loads(_engines), _rank)
