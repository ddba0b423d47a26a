"""The numerics pass finds planted errors and lets right engines be."""

import json
import sys
from pathlib import Path

import pytest
import torch

from accbench.comparing import update_rules
from accbench.comparing.update_rules import Weights
from accbench.config import TaskConfig
from accbench.engines import optimizers
from accbench.engines.common import optimizer_state
from benchmarks import planted
from benchmarks.numerics_passes import APART, FLOORS, folder_of, judge, start_setting
from benchmarks.numerics_settings import SETTINGS
from tests.conftest import start_ranks
from tests.engine_params import HAS_JAX, NEEDS_JAX, NEEDS_XLA

pytestmark = pytest.mark.usefixtures("as_users_have_it")

# Of all settings, those that differ most: dropout, a recipe, another kind of model.
OF_JAX = (pytest.param("small", marks=pytest.mark.soak), "small, sgd", "small, text")
LONG = ("small, adamw, two workers", "small, transformer")
# One error for each way in which the judge finds some; the other errors are found in the same ways.
TYPICAL = {
    "small": (
        "skips_third", "stops_after_five",  # counts in steps
        "skips_when_alone", "halved_when_alone",  # counts and weights of the free run
        "wrong_labels", "one_tensor_turned", "compressed",  # a step's gradients, all steps'
        "times_0_99",  # their size
        "first_frozen",  # none where there should be
        "rate_off", "beta2_0_99",  # a parameter and a second moment
        "bn_momentum",  # a buffer
        "evaluates_in_training", "dropout_off", "drops_the_same",
    ),
    # Ranks that differ, and that agree on what is wrong; buffers; dropout on several ranks.
    "small, two workers": (
        "not_averaged", "same_data", "statistics_shared", "drops_the_same_on_all",
    ),
    # What the gradients are clipped to and added up from; formula, momentum, average.
    "small, sgd": (
        "clipped_lower", "part_left_out", "all_decay", "momentum_off", "average_of_another_rate",
    ),
}  # fmt: skip


def is_long(setting: str, fault: str) -> bool:
    return setting in LONG or fault not in TYPICAL.get(setting, (fault,))


def run_ranks(num_ranks: int, arguments: list[str], env: dict[str, str]) -> None:
    """Run the ranks as `benchmarks.processes` does, but forked, and show what they print."""
    for process in start_ranks(num_ranks, *arguments, **env):
        process.wait()
        out, err = process.end()
        sys.stdout.write(out)
        sys.stderr.write(err)


class Passes:
    """Those of a setting, made at the first question; of rare errors, at the first about these."""

    def __init__(self, base: Path, plugins: Path) -> None:
        self.base, self.plugins = base, plugins
        self._made: set[tuple[str, str]] = set()

    def verdict(self, setting: str, engine: str):
        faults = SETTINGS[setting].faults
        rare = [fault for fault in faults if is_long(setting, fault)]
        # One process has all but engines of their own, and another the rare errors.
        of_process = engine if engine in APART else "rare" if engine in rare else "ddp"
        if (setting, of_process) not in self._made:
            self._made.add((setting, of_process))
            engines = rare if of_process == "rare" else [engine]
            if of_process == "ddp":
                usual = [fault for fault in faults if fault not in rare]
                engines = ["ddp:again", *usual, "not_loaded"]
                engines += ["crashes_when_loaded"] if setting == "small" else []
            start_setting(self.base, setting, [0], engines, self.plugins, run_ranks)
        return judge(self.base, setting, 0, engine)


@pytest.fixture(scope="module")
def passes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("numerics")
    return Passes(folder / "passes", planted.install(folder / "plugins"))


def right(setting, engine):
    """Parameters of the test below; `make test` has two settings of engine xla."""
    marks = [pytest.mark.xla, NEEDS_XLA] if engine == "xla" else []
    is_long = engine == "xla" and setting not in ("small, two workers", "small, text")
    return pytest.param(
        setting, engine, marks=[*marks, *([pytest.mark.soak] if is_long or setting in LONG else [])]
    )


@pytest.mark.parametrize(("setting", "engine"), [
    right(setting, engine)
    for engine in ("ddp:again", "ddp:no-channels_last", "xla")
    for setting in SETTINGS if setting.startswith("small")
])  # fmt: skip
def test_right_engines_train_the_same(passes, setting, engine):
    _look_at(passes, setting, engine)


@pytest.mark.parametrize("setting", OF_JAX)
@NEEDS_JAX
def test_jax_trains_the_same(passes, setting):
    _look_at(passes, setting, "jax")


def _look_at(passes, setting, engine):
    found = passes.verdict(setting, engine)
    assert found.verdict == "trains the same", found
    assert found.num_sharp_steps == found.num_steps >= 4
    assert found.sensitivity < 0.1
    assert ("own dropout" in found.tested) == (setting != "small, tied")
    assert {"evaluation", "free"} <= set(found.tested)


@pytest.mark.xla
@NEEDS_XLA
@pytest.mark.parametrize(
    "setting",
    ["lean, transformer", pytest.param("lean, convolutions", marks=pytest.mark.soak)],
)
def test_what_xla_is_given_on_a_gpu_trains_the_same_in_16_bits(tmp_path, setting):
    engines = ["xla:lean", *(["jax:lean"] if HAS_JAX else [])]
    start_setting(tmp_path, setting, [0], engines, tmp_path, run_ranks)
    for engine in engines:
        found = judge(tmp_path, setting, 0, engine)
        assert found.verdict == "trains the same", (engine, found)
        assert found.num_sharp_steps == found.num_steps >= 4


@pytest.mark.parametrize(
    ("setting", "engine"),
    [pytest.param(name, fault, marks=[pytest.mark.soak] if is_long(name, fault) else [])
     for name in SETTINGS if name.startswith("small") for fault in SETTINGS[name].faults],
)  # fmt: skip
def test_planted_errors_are_found(passes, setting, engine):
    found = passes.verdict(setting, engine)
    assert found.verdict == "differs", found
    assert found.reason


@pytest.mark.parametrize(
    ("engine", "where"),
    [
        ("skips_third", (3, "applied steps")), ("wrong_labels", (8, None)),
        ("stops_after_five", (6, "applied steps")), ("skips_when_alone", (8, "applied steps")),
        ("dropout_off", (1, None)), ("bn_momentum", (1, "buffer net.1.running_mean")),
        ("one_tensor_turned", (1, None)), ("beta2_0_99", (1, None)),
    ],
)  # fmt: skip
def test_first_step_and_tensor_are_named(passes, engine, where):
    found = passes.verdict("small", engine)
    step, name = where
    assert found.first_step == step
    assert name is None or found.first_tensor == name, found


def test_dropout_of_its_own_is_looked_at(passes):
    assert "repeats itself" in passes.verdict("small", "drops_the_same").reason
    on_ranks = passes.verdict("small, two workers", "drops_the_same_on_all").reason
    assert "the same on several ranks" in on_ranks


@pytest.mark.parametrize("setting", ["small", "small, two workers"])
def test_engine_that_cannot_be_loaded_is_not_checked(passes, setting):
    found = passes.verdict(setting, "not_loaded")
    assert (found.verdict, found.crashed) == ("not checked", False)
    assert "cannot be loaded" in found.reason
    assert "is not what was loaded" in found.reason


def test_pass_that_crashes_says_so(passes):
    found = passes.verdict("small", "crashes_when_loaded")
    assert (found.verdict, found.crashed) == ("not checked", True)
    assert "did not end" in found.reason


def test_the_reference_trains_as_float32_does_but_for_rounding(passes):
    passes.verdict("small", "ddp:again")

    def losses(engine: str, phase: str) -> list[float]:
        path = folder_of(passes.base, "small", 0, engine) / "records.jsonl"
        found = [json.loads(line) for line in path.read_text().splitlines()]
        return [line["loss"] for line in found if line.get("phase") == phase]

    exact = losses("reference", "reference")
    assert len(exact) == 8
    assert losses("ddp", "step") == pytest.approx(exact, rel=1e-5)
    assert losses("ddp", "free") == pytest.approx(exact, rel=1e-4)


@pytest.mark.parametrize("setting", ["small", "small, two workers"])
def test_plain_ddp_does_each_step_again_as_other_programs_might(passes, setting):
    """Off by little, each time by something else, and never in what the optimizer does."""
    passes.verdict(setting, "ddp:again")
    drawn: dict[int, list[dict[str, float]]] = {}
    for floor in FLOORS:
        path = folder_of(passes.base, setting, 0, floor) / "records.jsonl"
        for line in map(json.loads, path.read_text().splitlines()):
            if line.get("phase") == "noise":
                drawn.setdefault(line["step"], []).append(line["distances"])
            elif line.get("phase") == "noise of evaluation":
                drawn.setdefault(0, []).append(line["distances"])
    num_steps = 8 if setting == "small" else 4
    assert sorted(drawn) == [*range(num_steps + 1)]
    for step, of_step in drawn.items():
        assert len(of_step) == (4 if step else 8)
        assert max(found["loss"] for found in of_step) < 1e-4
        if step:
            gradients = [found["gradient"] for found in of_step]
            assert len(set(gradients)) == 4
            assert 0 < min(gradients) <= max(gradients) < 0.02
        assert not any(name.startswith("update") for found in of_step for name in found)
    lines = (folder_of(passes.base, setting, 0, "ddp") / "records.jsonl").read_text().splitlines()
    phases = [json.loads(line).get("phase") for line in lines]
    assert phases.count("noise of free") == 2 * num_steps
    assert phases.count("noise of free end") == 2
    path = folder_of(passes.base, setting, 0, "ddp:again") / "records.jsonl"
    assert "noise" not in path.read_text()


@pytest.mark.parametrize(
    "task",
    [TaskConfig(lr=0.03, weight_decay=0.1),
     TaskConfig(lr=0.03, weight_decay=0.1, decay="matrices"),
     TaskConfig(optimizer="sgd", lr=0.03, weight_decay=0.1, decay="matrices"),
     TaskConfig(optimizer="sgd", lr=0.03, weight_decay=0.1, nesterov=True)],
)  # fmt: skip
def test_rules_are_torchs(task):
    """Ten steps in float64, beside the optimizer whose formula it is."""
    generator = torch.Generator().manual_seed(0)
    start = {"w": torch.randn(5, 3, generator=generator), "b": torch.randn(7, generator=generator)}
    rule = update_rules.of_task(task)
    own = Weights.start(start, rule)
    parameters = {n: torch.nn.Parameter(tensor.double()) for n, tensor in start.items()}
    classes = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    net = torch.nn.ParameterDict(parameters)
    arguments = optimizers.of_task(task).arguments(task)
    optimizer = classes[task.optimizer](optimizer_state.groups(task, net), **arguments)
    for step in range(10):
        gradients = {n: torch.randn(t.shape, generator=generator) for n, t in start.items()}
        if step % 3 == 2:
            del gradients["b"]
        for name, parameter in parameters.items():
            parameter.grad = gradients[name].double() if name in gradients else None
        optimizer.step()
        own = own.after(rule, gradients)
    for name, parameter in parameters.items():
        assert torch.allclose(own.parameters[name].double(), parameter.detach(), rtol=1e-5), name
