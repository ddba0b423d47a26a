"""Both engines train the same, and the same as a loop that anyone can check."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from accbench import config, models, resolving
from accbench.config import plugins
from accbench.data import mock_images
from accbench.distributed.process_group import Topology
from tests.conftest import two_ranks
from tests.engine_params import NEEDS_XLA, XLA

pytestmark = pytest.mark.usefixtures("as_users_have_it")

STEPS = "tests/scripts/steps.py"
NUM_STEPS = 10
# Adam divides by the gradient's size, so rounding in gradients that are nearly
# zero is blown up to the size of a step; small steps keep ten of them comparable.
FLAGS = (
    "--model=resnet10", "--image_size=64", "--batch_size=4", "--amp_level=O0", "--workers=0",
    "--threads=1", f"--max_steps={NUM_STEPS}", "--lr=1e-5", "--seed=3",
)  # fmt: skip


def plain_loop(images: Path) -> dict:
    """Both shards in one process, gradients averaged by hand, torch's plain AdamW."""
    shards = [Topology(rank=rank, world_size=2) for rank in range(2)]
    flags = (*FLAGS, f"--data=mock:{images}")
    task = resolving.resolve(config.parse(flags))
    sources = [plugins.load("data", "mock")(str(images), task, None, shard) for shard in shards]
    spec = models.of_task(task)
    torch.manual_seed(task.seed)
    net = spec.build(sources[0].num_classes)
    # One network, and for each shard its own BatchNorm statistics.
    buffers = [{k: v.clone() for k, v in net.named_buffers()} for _ in shards]
    optimizer = torch.optim.AdamW(net.parameters(), lr=task.lr, weight_decay=task.weight_decay)
    losses: list[list[float]] = [[], []]
    loaders = [source.train_loader() for source in sources]
    for _, batches in zip(range(NUM_STEPS), zip(*loaders, strict=True), strict=False):
        gradients = []
        for rank, (images_NCHW, labels_N) in enumerate(batches):
            for name, buffer in net.named_buffers():
                buffer.copy_(buffers[rank][name])
            loss = functional.cross_entropy(net(images_NCHW), labels_N)
            gradients.append(torch.autograd.grad(loss, list(net.parameters())))
            buffers[rank] = {k: v.clone() for k, v in net.named_buffers()}
            losses[rank].append(loss.item())
        for parameter, first, second in zip(net.parameters(), *gradients, strict=True):
            parameter.grad = (first + second) / 2
        optimizer.step()
    return {"losses": losses, "parameters": dict(net.named_parameters()), "buffers": buffers}


class Results(dict):
    """Engine -> what each rank saved; and under "plain" the loop above. Made when asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.images = folder, folder / "mock"
        plan = mock_images.MockImagePlan(num_classes=3, num_train=28, num_val=1)
        mock_images.make(self.images, plan)

    def __missing__(self, name: str):
        self[name] = self._of_plain_loop() if name == "plain" else self._of_engine(name)
        return self[name]

    def _of_engine(self, engine: str) -> list[dict]:
        out = self.folder / engine
        out.mkdir()
        flags = (*FLAGS, f"--engine={engine}", f"--data=mock:{self.images}")
        result = two_ranks(STEPS, str(out), *flags)
        assert result.returncode == 0, result.stderr
        return [torch.load(out / f"rank{r}.pt", weights_only=True) for r in range(2)]

    def _of_plain_loop(self) -> dict:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return plain_loop(self.images)
        finally:
            torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Results:
    return Results(tmp_path_factory.mktemp("results"))


@pytest.mark.xla
@NEEDS_XLA
@pytest.mark.soak
def test_language_models_agree(tmp_path):
    """Rotary positions, attention and ignored labels; without dropout, which engines draw alone."""
    pytest.importorskip("transformers")
    flags = (
        *FLAGS,
        "--model=llama_tiny",
        "--data=tokens:docs",
        "--seq_len=32",
        "--max_steps=4",
        "--lr=1e-3",
    )
    found = {}
    for engine in ("ddp", "xla"):
        (tmp_path / engine).mkdir()
        result = two_ranks(STEPS, str(tmp_path / engine), *flags, f"--engine={engine}")
        assert result.returncode == 0, result.stderr
        found[engine] = [
            torch.load(tmp_path / engine / f"rank{r}.pt", weights_only=True) for r in range(2)
        ]
    for of_ddp, of_xla in zip(found["ddp"], found["xla"], strict=True):
        assert of_xla["losses"] == pytest.approx(of_ddp["losses"], rel=1e-4)
        assert of_ddp["losses"][3] < of_ddp["losses"][0] - 0.02
        for name, expected in of_ddp["state"].items():
            distance = (of_xla["state"][name] - expected).abs()
            assert distance.mean() < 1e-5, name  # four steps move a weight by up to 4e-3


@pytest.mark.xla
@NEEDS_XLA
def test_engines_agree_where_parts_of_a_step_have_different_numbers_of_labels(tmp_path):
    flags = (*FLAGS, "--model=tests.nets:later_letters", "--data=tokens:docs/architecture.md",
             "--seq_len=4", "--accumulate=2", "--max_steps=3", "--lr=1e-2")  # fmt: skip
    losses = {}
    for engine in ("ddp", "xla"):
        (tmp_path / engine).mkdir()
        result = two_ranks(STEPS, str(tmp_path / engine), *flags, f"--engine={engine}")
        assert result.returncode == 0, result.stderr
        of_rank = (torch.load(tmp_path / engine / f"rank{r}.pt")["losses"] for r in range(2))
        losses[engine] = [*zip(*of_rank, strict=True)]
    for of_ddp, of_xla in zip(losses["ddp"], losses["xla"], strict=True):
        assert of_xla == pytest.approx(of_ddp, rel=1e-5)
    # Each rank has its share of the mean over all labels.
    assert any(abs(first - second) > 0.1 * first for first, second in losses["ddp"])


ENGINES = pytest.mark.parametrize("engine", ["ddp", XLA])


@ENGINES
def test_losses_are_those_of_the_plain_loop(results, engine):
    for rank in range(2):
        losses = results[engine][rank]["losses"]
        assert len(losses) == NUM_STEPS
        assert losses == pytest.approx(results["plain"]["losses"][rank], rel=1e-3)


@pytest.mark.xla
@NEEDS_XLA
def test_losses_of_the_engines_agree(results):
    for of_ddp, of_xla in zip(results["ddp"], results["xla"], strict=True):
        assert of_xla["losses"] == pytest.approx(of_ddp["losses"], rel=1e-3)


@ENGINES
def test_parameters_are_identical_on_both_ranks(results, engine):
    first, second = (rank["state"] for rank in results[engine])
    names = results["plain"]["parameters"].keys()
    assert len(names) == 38
    for name in names:
        assert torch.equal(first[name], second[name]), name


@ENGINES
def test_parameters_are_those_of_the_plain_loop(results, engine):
    for name, expected in results["plain"]["parameters"].items():
        got = results[engine][0]["state"][name]
        # Ten Adam steps move a parameter by at most 10 lr; rounding may turn a few
        # whole steps of parameters whose gradient is nearly zero, never their mass.
        distance = (got - expected).abs()
        assert distance.max() <= 2 * NUM_STEPS * 1e-5 * 1.01, name
        assert distance.mean() <= 1e-5, name


@ENGINES
def test_batchnorm_statistics_are_those_of_the_ranks_own_shard(results, engine):
    for rank in range(2):
        state = results[engine][rank]["state"]
        own, other = (results["plain"]["buffers"][r] for r in (rank, 1 - rank))
        for name in own:
            if name.endswith("num_batches_tracked"):
                assert state[name] == NUM_STEPS
            elif ".running_" in name:
                distance = (state[name] - own[name]).norm() / own[name].norm()
                to_other = (state[name] - other[name]).norm() / other[name].norm()
                assert distance < 2e-3, name
                assert to_other > 5 * distance, name


@ENGINES
def test_every_step_was_applied(results, engine):
    assert [rank["applied_steps"] for rank in results[engine]] == [NUM_STEPS, NUM_STEPS]


@ENGINES
def test_a_reduction_that_does_nothing_is_refused(images, tmp_path, engine):
    flags = (*FLAGS, "--model=tests.nets:tiny", f"--engine={engine}", f"--data=mock:{images}")
    result = two_ranks(STEPS, str(tmp_path), "--break_reduction", *flags)
    assert result.returncode != 0
    assert "gradients are not averaged over the 2 ranks" in result.stderr
    assert "1.5 is right" in result.stderr
    assert not list(tmp_path.iterdir())
