"""Settings of the numerics trials: a network, sizes, a type, workers, and the errors to plant."""

import dataclasses

from benchmarks import planted

STEPS = 20


@dataclasses.dataclass(frozen=True)
class Setting:
    """Hold the flags of a run and the names of the errors to plant in it."""

    flags: tuple[str, ...]
    num_workers: int = 1
    faults: tuple[str, ...] = ()


def flags_of(
    model: str, px: int, batch: int, amp: str = "O0", steps: int = STEPS
) -> tuple[str, ...]:
    """Return the flags of a run on synthetic batches; `amp` is O0 or a 16-bit type."""
    dtype = () if amp == "O0" else (f"--amp_dtype={amp}",)
    level = "O0" if amp == "O0" else "O1"
    return (
        f"--model={model}", f"--image_size={px}", f"--batch_size={batch}", f"--amp_level={level}",
        *dtype, "--lr=1e-4", "--workers=0", "--threads=1", "--device=cpu", "--data=synthetic",
        "--synthetic.num_classes=10", f"--synthetic.num_batches={steps}",
        f"--max_steps={steps}", "--timeout_s=300",
    )  # fmt: skip


# Everything at once that a recipe may ask for.
_RECIPE = (
    "--decay=matrices", "--weight_decay=0.1", "--clip_norm=0.1", "--accumulate=2",
    "--ema_decay=0.9", "--label_smoothing=0.1", "--mixup=0.2", "--cutmix=1",
)  # fmt: skip
_SGD = (*_RECIPE, "--optimizer=sgd", "--nesterov", "--lr=0.05")


def of_sequences(model: str, seq_len: int, px: int, amp: str = "O0") -> Setting:
    """Return four steps of a model of text or videos."""
    sizes = (f"--seq_len={seq_len}", "--synthetic.num_classes=64")
    return Setting((*flags_of(model, px, 4, amp, steps=4), *sizes))


SEQUENCES = {"gpt2_tiny": 32, "bert_tiny": 32, "llama_tiny": 32, "lstm_tiny": 8, "convlstm_tiny": 1}
_ONE, _NETS = tuple(planted.ALWAYS), tuple(planted.OF_CONVOLUTIONS)
_DROPS = tuple(name for name in planted.OF_DROPOUT)
_RANKS = tuple(name for name in planted.OF_RANKS if name != "drops_the_same_on_all")
SETTINGS = {
    # Few steps of small networks, seconds each.
    "small": Setting(
        flags_of("benchmarks.nets:dropping", 32, 8, steps=8), 1, _ONE + _NETS + _DROPS
    ),
    "small, tied": Setting(flags_of("benchmarks.nets:tied", 32, 8, steps=4), 1),
    "small, transformer": Setting(
        flags_of("benchmarks.nets:transformer", 32, 8, steps=4), 1, _DROPS
    ),
    "small, two workers": Setting(
        flags_of("benchmarks.nets:dropping", 32, 8, steps=4), 2, tuple(planted.OF_RANKS)
    ),
    "small, sgd": Setting(
        (*flags_of("benchmarks.nets:dropping", 32, 8, steps=4), *_SGD), 1,
        (*planted.OF_RECIPES, *planted.OF_SGD, "rate_off", "skips_third"),
    ),
    "small, adamw, two workers": Setting(
        (*flags_of("benchmarks.nets:dropping", 32, 8, steps=4), *_RECIPE), 2,
        (*planted.OF_RECIPES, "not_averaged"),
    ),
    "small, text": of_sequences("lstm_tiny", 8, 32),
    "small, ignored labels, two workers": Setting(
        (*of_sequences("benchmarks.nets:answers", 16, 32).flags, "--accumulate=2"), 2,
        tuple(planted.OF_LABELS),
    ),
    # As --xla.lean has them, which is what a GPU gets.
    "lean, convolutions": Setting(flags_of("resnet10", 96, 8, "bfloat16", steps=4), 1),
    "lean, transformer": Setting(
        flags_of("benchmarks.nets:transformer", 32, 8, "float16", steps=4), 1
    ),
    "32 px, batch 2": Setting(flags_of("resnet10", 32, 2), 1, _ONE + _NETS),
    "96 px, batch 4": Setting(flags_of("resnet10", 96, 4), 1, _ONE + _NETS),
    "96 px, bfloat16": Setting(flags_of("resnet10", 96, 4, "bfloat16"), 1, _ONE + _NETS),
    "dropout": Setting(flags_of("benchmarks.nets:dropping", 32, 8), 1, _ONE + _NETS + _DROPS),
    "transformer": Setting(flags_of("benchmarks.nets:transformer", 32, 8), 1, _ONE + _DROPS),
    "transformer, bfloat16": Setting(
        flags_of("benchmarks.nets:transformer", 32, 8, "bfloat16"), 1, _ONE + _DROPS
    ),
    "tied": Setting(flags_of("benchmarks.nets:tied", 32, 8), 1, _ONE),
    "two workers": Setting(flags_of("resnet10", 64, 4), 2, _RANKS + ("times_0_9", "stale")),
    "two workers, bfloat16": Setting(
        flags_of("resnet10", 64, 4, "bfloat16"), 2, _RANKS + ("times_0_9",)
    ),
    "two workers, dropout": Setting(
        flags_of("benchmarks.nets:dropping", 32, 8), 2, tuple(planted.OF_RANKS) + _DROPS
    ),
    **{name: of_sequences(name, length, 16) for name, length in SEQUENCES.items()},
    **{
        f"{name}, bfloat16": of_sequences(name, length, 16, "bfloat16")
        for name, length in SEQUENCES.items()
    },
}  # fmt: skip

# One model of every kind that people train: benchmarks/research/named_models.py.
NAMED = {
    "resnet18": ("resnet18", 96), "resnet50": ("resnet50", 96), "vit_ti_16": ("vit_ti_16", 64),
    "convnext_tiny": ("torchvision:convnext_tiny", 64),
    "mobilenet_v3_small": ("torchvision:mobilenet_v3_small", 96),
    "gpt2_tiny": ("gpt2_tiny", 16), "bert_tiny": ("bert_tiny", 16),
    # Residual branches begin at zero: in 16 bits torchvision's, which don't, are no sharp test.
    "timm:resnet18": ("timm:resnet18", 96), "timm:resnet50": ("timm:resnet50", 96),
}  # fmt: skip


def named(model: str, dtype: str, num_workers: int) -> str:
    """Add ten steps of a named model to `SETTINGS`; return the setting's name."""
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
