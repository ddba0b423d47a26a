"""Engines with one planted error each, found through entry points as an installed package's are.

`install(FOLDER)` writes the package's metadata. With FOLDER on PYTHONPATH the engines have the
names in `NAMES`. An error is grouped by what it takes to find it.
"""

from pathlib import Path

from benchmarks.planted import gradients, model, optimizer, ranks, steps
from benchmarks.planted.gradients import scaled
from benchmarks.planted.model import dropping, of_batchnorm
from benchmarks.planted.optimizer import of_another_task, with_options


def install(folder: Path) -> Path:
    """Write the entry points of all engines into `folder`, which must not exist; return it."""
    info = folder / "planted_engines-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted-engines\nVersion: 1.0\n")
    lines = [f"{name} = {__name__}:{class_.__name__}" for name, class_ in NAMES.items()]
    (info / "entry_points.txt").write_text("\n".join(["[accbench.engines]", *lines, ""]))
    return folder


# One worker finds these in any network.
ALWAYS = {
    "times_0_9": scaled(0.9), "times_1_1": scaled(1.1), "times_0_99": scaled(0.99),
    "one_tensor_scaled": gradients.OneTensorScaled, "one_tensor_turned": gradients.OneTensorTurned,
    "biases_dropped": gradients.BiasesDropped, "stale": gradients.Stale,
    "never_zeroed": gradients.NeverZeroed, "clipped": gradients.Clipped,
    "noisy": gradients.Noisy, "compressed": gradients.Compressed,
    "skips_third": steps.SkipsThird, "stops_after_five": steps.StopsAfterFive,
    "applies_twice": steps.AppliesTwice, "skips_when_alone": steps.SkipsWhenAlone,
    "halved_when_alone": steps.HalvedWhenAlone, "wrong_labels": steps.WrongLabelsFromEight,
    "batch_twice": steps.BatchTwice, "mirrored": steps.Mirrored,
    "smoothed": model.Smoothed, "last_left_out": model.LastSampleLeftOut,
    "wrong_epsilon": with_options(eps=1e-6), "beta2_0_99": with_options(betas=(0.9, 0.99)),
    "no_decay": with_options(weight_decay=0.0), "amsgrad": with_options(amsgrad=True),
    "rate_off": optimizer.RateOff, "coupled_decay": optimizer.Coupled,
    "rounded": optimizer.Rounded, "first_frozen": optimizer.FirstFrozen,
    "brighter": model.Brighter,
}  # fmt: skip
OF_CONVOLUTIONS = {
    "bn_momentum": of_batchnorm(momentum=0.11), "bn_epsilon": of_batchnorm(eps=1e-3),
    "bn_untracked": of_batchnorm(momentum=0.0), "leaky": model.Leaky,
    "evaluates_in_training": model.EvaluatesInTrainingMode,
}  # fmt: skip
OF_DROPOUT = {
    "dropout_off": dropping(0.0), "dropout_halved": dropping(0.5),
    "drops_the_same": model.DropsTheSame,
}  # fmt: skip
# These need several workers.
OF_RANKS = {
    "not_averaged": ranks.NotAveraged, "summed": ranks.Summed,
    "bucket_left_out": ranks.BucketLeftOut, "bucket_of_rank0": ranks.BucketOfRank0,
    "only_rank0": ranks.OnlyRank0, "same_data": ranks.SameData,
    "statistics_shared": ranks.StatisticsShared,
    "drops_the_same_on_all": model.DropsTheSameOnAllRanks,
}  # fmt: skip
# These need the flags of a whole recipe.
OF_RECIPES = {
    "not_clipped": of_another_task(clip_norm=None),
    "clipped_lower": of_another_task(clip_norm=0.09),
    "part_left_out": optimizer.FirstPartLeftOut, "in_one_part": of_another_task(accumulate=1),
    "all_decay": of_another_task(decay="all"), "average_left_out": optimizer.AverageLeftOut,
    "average_of_another_rate": of_another_task(ema_decay=0.89),
}  # fmt: skip
OF_SGD = {
    "momentum_off": of_another_task(momentum=0.88),
    "not_nesterovs": of_another_task(nesterov=False),
}
OF_LABELS = {"mean_of_means": ranks.MeanOfMeans}
OTHERS = {
    "slowed": steps.Slowed, "crashes": steps.Crashes, "not_loaded": steps.NotLoaded,
    "crashes_when_loaded": steps.CrashesWhenLoaded, "frozen": steps.Frozen,
}  # fmt: skip
NAMES = {
    **ALWAYS, **OF_CONVOLUTIONS, **OF_DROPOUT, **OF_RANKS, **OF_RECIPES, **OF_SGD, **OF_LABELS,
    **OTHERS,
}  # fmt: skip
# Entry points name attributes of this module.
for _name, _class in NAMES.items():
    _class.__name__ = _class.__qualname__ = f"{_class.__name__}_{_name}"
    globals()[_class.__name__] = _class
