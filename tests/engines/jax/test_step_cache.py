"""A step kept on disk is another start's only where that does the very same."""

import contextlib
import hashlib
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.conftest import TINY, python, run, two_ranks

pytest.importorskip("jax")

FLAGS = (*TINY, "--engine=jax", "--device=cpu", "--data=synthetic")


def test_another_start_takes_the_step_from_its_file(tmp_path):
    done = python("-m", "tests.engines.jax.kept_steps", tmp_path, NPROC="1")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    losses = {start: of["losses"] for start, of in found.items()}
    kept = {start: set(of["kept"]) for start, of in found.items()}
    assert losses["smoothed"] != losses["first"]
    assert len(kept["first"]) == 1
    assert kept["smoothed"] > kept["first"]
    assert len(kept["smoothed"]) == 2
    # What is in the step's file is what is done, and one that is damaged is made again.
    assert losses["exchanged"] == losses["smoothed"]
    assert losses["damaged"] == losses["first"]
    assert kept["damaged"] == kept["exchanged"] == kept["smoothed"]
    (path,) = map(Path, kept["first"])
    content = path.read_bytes()
    assert hashlib.sha256(content[32:]).digest() == content[:32]


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


class Net(nn.Module):
    """A small net, done in one of many ways."""

    def __init__(self, way: str = "") -> None:
        super().__init__()
        self.way = way
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4, eps=1e-3 if way == "eps" else 1e-5)
        self.drop = nn.Dropout(0.3 if way == "rate" else 0.2)
        self.constant = torch.full((4,), 2.0 if way == "constant" else 1.0)
        if way == "frozen":
            self.second.weight.requires_grad_(False)
        if way == "tied":
            self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        blind = [torch.no_grad() if self.way == way else contextlib.nullcontext()
                 for way in ("blind first", "blind second")]  # fmt: skip
        with blind[0]:
            a = self.first(x).relu()
        with blind[1]:
            b = self.first(x).relu()
        x = a * 2 + b * 3 + self.constant
        if self.way == "detached":
            x = x.detach() + x
        x = x.tanh().relu() if self.way == "order" else x.relu().tanh()
        if self.way == "function":
            x = Scaled.apply(x)
        if self.way == "hook":
            x.register_hook(lambda gradient: gradient * 2)
        if self.way == "checkpoint":
            return checkpoint(self.drop, self.norm(self.second(x)), use_reentrant=False)
        if self.way == "in place":
            self.norm.running_mean.add_(1)
        return self.drop(self.norm(self.second(x)))


WAYS = ("eps", "rate", "constant", "frozen", "tied", "blind first", "blind second", "detached",
        "order", "in place")  # fmt: skip


def digest_of(net: nn.Module, scale: float = 1.0, autocast: bool = False, rows: int = 3) -> str:
    from accbench.engines.jax import fingerprint

    def cast():
        return torch.autocast("cpu", torch.bfloat16, enabled=autocast, cache_enabled=False)

    batch = torch.zeros(rows, 4)
    return fingerprint.step_digest(net, lambda n, x: n(x).float().mean() * scale, batch, cast)[0]


def test_steps_that_differ_have_other_digests():
    found = {way: digest_of(Net(way)) for way in ("", *WAYS)}
    found |= {"loss": digest_of(Net(), scale=0.5), "cast": digest_of(Net(), autocast=True)}
    found |= {"batch": digest_of(Net(), rows=5), "evaluating": digest_of(Net().eval())}
    assert len(set(found.values())) == len(found)
    assert digest_of(Net()) == found[""]  # whatever its weights are


@pytest.mark.parametrize("way", ["function", "hook", "checkpoint"])
def test_python_in_the_backward_pass_has_no_digest(way):
    from accbench.engines.jax import fingerprint

    with pytest.raises(fingerprint.UnknownError):
        digest_of(Net(way))
    assert digest_of(Net())  # and nothing of that is left


def test_an_operation_of_ones_own_has_no_digest():
    """What it does can be edited, and its name stays."""
    from accbench.engines.jax import fingerprint

    with torch.library._scoped_library("step_cache", "FRAGMENT") as library:
        library.define("doubled(Tensor x) -> Tensor")
        library.impl("doubled", lambda x: x * 2, "CompositeExplicitAutograd")
        library.impl("doubled", lambda x: x * 2, "Meta")
        with pytest.raises(fingerprint.UnknownError):
            fingerprint.step_digest(
                Net(), lambda net, x: torch.ops.step_cache.doubled(net(x).detach()).mean(),
                torch.zeros(3, 4), contextlib.nullcontext,
            )  # fmt: skip


class Attending(nn.Module):
    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.linear, self.is_causal = nn.Linear(8, 8), is_causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from accbench.engines.jax import fused_attention

        heads = self.linear(x)[:, None]
        return fused_attention.attention(heads, heads, heads, self.is_causal, 1.0)


def test_a_step_with_attention_of_accbenchs_own_has_a_digest():
    from accbench.engines.jax import fingerprint

    digests = {
        fingerprint.step_digest(
            Attending(is_causal), lambda net, x: net(x).mean(), torch.zeros(2, 3, 8),
            contextlib.nullcontext,
        )[0]
        for is_causal in (False, True, False)
    }  # fmt: skip
    assert len(digests) == 2


def test_attention_over_a_ring_of_ranks_has_no_digest():
    """The ranks of its group are in none of its arguments."""
    from accbench.distributed import ring_attention
    from accbench.engines.jax import fingerprint

    def loss(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        heads = net(x)[:, None].detach()
        return ring_attention._ring_attention(heads, heads, heads, "cp", False, 1.0)[0].mean()

    with pytest.raises(fingerprint.UnknownError, match="ring_attention"):
        fingerprint.step_digest(nn.Linear(8, 8), loss, torch.zeros(2, 3, 8), contextlib.nullcontext)


def losses_of_two(folder: Path, cache: Path) -> list[list[float]]:
    folder.mkdir()
    done = two_ranks("tests/scripts/steps.py", folder, *FLAGS, f"--jax.cache_dir={cache}")
    assert done.returncode == 0, done.stderr
    ranks = [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]
    return [rank["losses"] for rank in ranks]


def test_every_worker_finds_what_it_compiled(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")  # however fast
    # On a CPU each has keys of its own in the compiler's cache, and JAX lets the first alone write.
    cache = tmp_path / "cache"
    losses = losses_of_two(tmp_path / "first", cache)
    compiled = set(cache.rglob("jit_call-*-cache"))
    assert len(compiled) == 2
    times = {path: path.stat().st_mtime_ns for path in compiled}
    # A step that is captured again takes the place of the file.
    steps = {path: path.stat().st_ino for path in cache.rglob("*.jaxexport")}
    assert steps
    assert losses_of_two(tmp_path / "second", cache) == losses
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("jit_call-*-cache")} == times
    assert {path: path.stat().st_ino for path in cache.rglob("*.jaxexport")} == steps


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    done = run(*FLAGS, f"--jax.cache_dir={tmp_path / 'file'}", f"--output_dir={tmp_path / 'run'}")
    assert done.returncode == 2
    assert "name another folder by --jax.cache_dir" in done.stderr
    assert "Traceback" not in done.stderr
