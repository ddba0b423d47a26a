"""Small networks for `--model tests.nets:...`, some of which go wrong on purpose."""

import atexit
import ctypes
import dataclasses
import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from accbench.models import Classifier, Spec
from accbench.models.arcface import ArcFace, FaceNet
from benchmarks.nets import dropping, tiny, transformer  # noqa: F401  # named by flags
from benchmarks.nets import tied as tied  # noqa: F401


class _Versioned(nn.Sequential):
    """Wants to know of which version what it loads is."""

    _version = 2

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *others: Any
    ) -> None:
        if local_metadata.get("version") not in (1, 2):
            raise ValueError("version should be 1 or 2")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)


def versioned(num_classes: int) -> nn.Module:
    return _Versioned(*tiny(num_classes))


def wide(num_classes: int) -> nn.Module:
    """Likewise, most of it in large parameters."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, stride=2, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 1024),
        nn.ReLU(),
        nn.Linear(1024, num_classes),
    )


def shallow_vit(num_classes: int) -> nn.Module:
    """vit_ti_16 with two layers of its twelve, for images of 32 pixels."""
    from torchvision.models.vision_transformer import VisionTransformer

    return VisionTransformer(32, 16, 2, 3, 192, 4 * 192, num_classes=num_classes)


@dataclasses.dataclass(frozen=True)
class ShallowFace(ArcFace):
    """arcface_r18 with a unit a stage."""

    name: str = "tests.nets:ShallowFace"
    build_net: Callable[..., nn.Module] = nn.Identity

    def build(self, num_classes: int) -> nn.Module:
        return Classifier(FaceNet((1, 1, 1, 1), self.image_size, num_classes), num_classes)


def leaves_the_compiler(num_classes: int) -> nn.Module:
    """Has a pooling that torch_xla 2.8.1 knows no XLA operation for."""
    net = tiny(num_classes)
    net.insert(3, nn.AdaptiveMaxPool2d(4))
    return net


class _Faulty(nn.Module):
    """`tiny`, but in its third forward pass on rank 1 something happens."""

    def __init__(self, num_classes: int, fault) -> None:
        super().__init__()
        self.net, self.fault, self.calls = tiny(num_classes), fault, 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3 and os.environ.get("RANK") == "1":
            self.fault()
        return self.net(images)


def _raise() -> None:
    raise ValueError("planted fault")


def raises_on_rank1(num_classes: int) -> nn.Module:
    return _Faulty(num_classes, _raise)


def raises_on_rank1_and_crashes(num_classes: int) -> nn.Module:
    """As above; then the process aborts while it ends."""

    def fault() -> None:
        atexit.register(os.abort)
        _raise()

    return _Faulty(num_classes, fault)


def killed_on_rank1(num_classes: int) -> nn.Module:
    return _Faulty(num_classes, lambda: os.kill(os.getpid(), signal.SIGKILL))


def sleeps_on_rank1(num_classes: int) -> nn.Module:
    return _Faulty(num_classes, lambda: time.sleep(3600))


def stopped_on_rank1(num_classes: int) -> nn.Module:
    return _Faulty(num_classes, lambda: os.kill(os.getpid(), signal.SIGSTOP))


class _NotANumber(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.net = tiny(num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.net(images) * float("nan")


def not_a_number(num_classes: int) -> nn.Module:
    return _NotANumber(num_classes)


def not_compiled(num_classes: int) -> nn.Module:
    """torch.compile leaves it to eager PyTorch."""
    net = tiny(num_classes)
    net.forward = torch.compiler.disable(net.forward)
    return net


def slow(num_classes: int) -> nn.Module:
    """Takes its time, so that a test can interrupt it; SLOW_NET_S says how many seconds a step."""
    net, seconds = tiny(num_classes), float(os.environ.get("SLOW_NET_S", 0.2))
    net.register_forward_pre_hook(lambda *_: time.sleep(seconds))
    return net


def deaf(num_classes: int) -> nn.Module:
    """As `slow`, but in C, as a compiled step is; Python's handlers of signals wait meanwhile."""
    net, seconds = tiny(num_classes), float(os.environ.get("SLOW_NET_S", 0.2))
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)

    def wait(*_: object) -> None:
        fraction, whole = math.modf(time.time() + seconds)
        until = (ctypes.c_long * 2)(int(whole), int(fraction * 1e9))  # struct timespec
        libc.pthread_mutex_timedlock(mutex, until)  # which no signal wakes, unlike a sleep

    net.register_forward_pre_hook(wait)
    return net


def counts_threads(num_classes: int) -> nn.Module:
    """Says how many threads the process had in its forward pass, and has when it ends."""
    net, during = tiny(num_classes), []

    def count(*_: object) -> None:
        during.append(len(os.listdir("/proc/self/task")))

    def tell() -> None:
        count()
        print(f"threads: {max(during[:-1])} then {during[-1]}", flush=True)

    net.register_forward_pre_hook(count)
    atexit.register(tell)
    return net


def loud(num_classes: int) -> nn.Module:
    """Its gradients overflow float16 until the loss scale has come down from 2^16."""
    net = tiny(num_classes)
    net.append(_Times(2.0**6))
    return net


class _Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values * self.factor


class _KilledOnce(nn.Module):
    """`dropping`, killed in rank 1's (or the only rank's) n-th forward pass, once.

    KILLED_ONCE is a file that says n, and is gone afterwards.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.net, self.calls = dropping(num_classes), 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        order = Path(os.environ.get("KILLED_ONCE", "/nowhere"))
        last = int(os.environ.get("WORLD_SIZE", 1)) - 1
        is_last = int(os.environ.get("RANK", 0)) == last
        if is_last and order.exists() and self.calls == int(order.read_text()):
            order.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.net(images)


def frozen_first(num_classes: int) -> nn.Module:
    """`tiny`, whose convolution is not trained."""
    net = tiny(num_classes)
    net[0].requires_grad_(False)
    return net


class _DecidesByValue(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.net = tiny(num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits = self.net(images)
        return logits * 2 if float(logits.sum()) > 0 else logits


def decides_by_value(num_classes: int) -> nn.Module:
    """`tiny`, whose graph depends on what it computes."""
    return _DecidesByValue(num_classes)


def killed_once(num_classes: int) -> nn.Module:
    return _KilledOnce(num_classes)


def slow_killed_once(num_classes: int) -> nn.Module:
    """The same net, that takes its time as `slow` does."""
    net = _KilledOnce(num_classes)
    net.register_forward_pre_hook(lambda *_: time.sleep(float(os.environ["SLOW_NET_S"])))
    return net


class _WrongAt(nn.Module):
    """`tiny`, whose logits on the last rank are not finite in the forward passes WRONG_AT names."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.net, self.calls = tiny(num_classes), 0
        is_last = int(os.environ.get("RANK", 0)) == int(os.environ.get("WORLD_SIZE", 1)) - 1
        self.wrong = os.environ["WRONG_AT"].split(",") if is_last else []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        is_wrong = self.training and ("all" in self.wrong or str(self.calls) in self.wrong)
        return self.net(images) * (float("inf") if is_wrong else 1.0)


def wrong_at(num_classes: int) -> nn.Module:
    return _WrongAt(num_classes)


class _WrongOnWhite(nn.Module):
    """`tiny`, whose logits are not finite in training where an image is white all over."""

    def __init__(self, num_classes: int, has_gradient: bool) -> None:
        super().__init__()
        self.net, self.has_gradient = tiny(num_classes), has_gradient

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        is_white = (images.amin(dim=(1, 2, 3)) > 2.0).unsqueeze(1) & self.training
        if self.has_gradient:
            return self.net(images) * torch.where(is_white, float("inf"), 1.0)
        return self.net(images).masked_fill(is_white, float("inf"))


def wrong_on_white(num_classes: int) -> nn.Module:
    return _WrongOnWhite(num_classes, has_gradient=True)


def wrong_loss_on_white(num_classes: int) -> nn.Module:
    return _WrongOnWhite(num_classes, has_gradient=False)


class _Infinite(torch.autograd.Function):
    """The values as they are, gradients beyond every type."""

    @staticmethod
    def forward(context, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(context, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float("inf")


class _Overflowing(nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return _Infinite.apply(values)


def overflowing(num_classes: int) -> nn.Module:
    """Its loss is fine, and its gradients never are."""
    net = tiny(num_classes)
    net.append(_Overflowing())
    return net


class _Hungry(nn.Module):
    """Wants 32 TiB for a batch of more than two, which no machine has to give."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.net, self.calls = tiny(num_classes), 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if len(images) > 2 and self.calls == 3:
            torch.empty(1 << 45, dtype=torch.uint8)
        return self.net(images)


def hungry(num_classes: int) -> nn.Module:
    return _Hungry(num_classes)


class _Asks(nn.Module):
    """Decides by a value, for which the host must wait."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.net = tiny(num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits = self.net(images)
        if logits.max() > 100:  # the host asks
            logits = logits / 100
        return logits


class _NoWayBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, given):
        return given * 2

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("no way back from here")


class _Raising(nn.Module):
    """Its backward pass fails."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, num_classes, 4, stride=4)
        self.norm = nn.BatchNorm2d(num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.norm(_NoWayBack.apply(self.stem(images))).mean((2, 3))


def raising(num_classes: int) -> nn.Module:
    return _Raising(num_classes)


def asks_the_host(num_classes: int) -> nn.Module:
    return _Asks(num_classes)


class _Returns(nn.Module):
    """`tiny`, whose logits come in another form."""

    def __init__(self, num_classes: int, form) -> None:
        super().__init__()
        self.net, self.form = tiny(num_classes), form

    def forward(self, images: torch.Tensor):
        return self.form(self.net(images))


def returns_dict(num_classes: int) -> nn.Module:
    return _Returns(num_classes, lambda logits: {"features": logits[:, :1], "logits": logits})


def returns_tuple(num_classes: int) -> nn.Module:
    return _Returns(num_classes, lambda logits: (logits, logits.sum()))


def returns_words(num_classes: int) -> nn.Module:
    return _Returns(num_classes, lambda logits: "logits")


def takes_nothing() -> nn.Module:
    """Has ten classes, whatever is asked for."""
    return tiny(10)


def no_module(num_classes: int):
    return tiny  # which should have been called


class Autoencoder(Spec):
    """A model with a loss and batches of its own: vectors that it should give back."""

    name = "tests.nets:Autoencoder"

    def build(self, num_classes: int) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 8))

    def loss(self, model: nn.Module, batch) -> torch.Tensor:
        vectors, weight = batch["vectors"]["of 8"], batch["weight"]
        away = (model(vectors) - vectors).float().square().mean(1)
        return (away * weight).mean()

    def synthetic_batch(self, batch_size: int, num_classes: int, generator: torch.Generator):
        vectors = torch.randn(batch_size, 8, generator=generator)
        return {"vectors": {"of 8": vectors}, "weight": torch.ones(batch_size)}


class _Unused(nn.Module):
    """`tiny` with a layer that no sample passes."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.net, self.spare = tiny(num_classes), nn.Linear(4, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.net(images)


def unused(num_classes: int) -> nn.Module:
    return _Unused(num_classes)


class _Checkpointed(nn.Module):
    """Two blocks, computed again in the backward pass; the second with dropout."""

    def __init__(self, num_classes: int, reentrant: bool, dropout: float) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.GELU(), nn.Dropout(p))
            for p in (0.0, dropout)
        )
        self.head, self.reentrant = nn.Linear(16, num_classes), reentrant

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(images)
        for block in self.blocks:
            hidden = hidden + checkpoint(block, hidden, use_reentrant=self.reentrant)
        return self.head(hidden.mean((2, 3)))


def checkpointed(num_classes: int) -> nn.Module:
    return _Checkpointed(num_classes, reentrant=False, dropout=0.0)


def checkpointed_reentrant(num_classes: int) -> nn.Module:
    return _Checkpointed(num_classes, reentrant=True, dropout=0.0)


def checkpointed_dropping(num_classes: int) -> nn.Module:
    return _Checkpointed(num_classes, reentrant=False, dropout=0.3)


def cumulative(num_classes: int) -> nn.Module:
    """`tiny`, whose BatchNorm averages over all batches."""
    net = tiny(num_classes)
    net[1].momentum = None
    return net


class _Keeps(nn.Module):
    """`tiny` with a tensor that is no buffer, a buffer that others take the place of, and large
    integers."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.net, self.table = tiny(num_classes), torch.linspace(0.5, 1.5, num_classes)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + len(images)
        images.mul_(0.5)
        large = torch.arange(images.shape[-1]) * 0x7FEB352D  # beyond 32 bits
        return self.net(images + (large >> 30 & 0xF) / 64) * self.table


def keeps(num_classes: int) -> nn.Module:
    return _Keeps(num_classes)


class _Masks(nn.Module):
    """Picks pixels by their value: how many is known when they are there. And weighs rows by their
    places, of which torch_xla gives another last row while a dispatch mode looks on."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.net = tiny(num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        bright = images[images > 0.5]
        height, width = images.shape[2:]
        rows = torch.arange(1, height + 1, device=images.device).to(images.dtype)
        rows_1HW = rows.unsqueeze(1).repeat(1, 1, width)
        return self.net(images * rows_1HW / rows_1HW[:, -1:, :]) + bright.mean()


def masks(num_classes: int) -> nn.Module:
    return _Masks(num_classes)


class _Tabled(nn.Module):
    """Makes a table when it first sees a size, in the place of a buffer."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, num_classes, 4, stride=4, bias=False)
        self.norm = nn.BatchNorm2d(num_classes)
        self.register_buffer("table", torch.zeros(1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.stem(images)).flatten(2)
        if self.table.shape[0] != hidden.shape[2]:
            self.table = torch.linspace(0.5, 2, hidden.shape[2]).to(hidden)
        return (hidden * self.table).mean(2)


def tabled(num_classes: int) -> nn.Module:
    return _Tabled(num_classes)


class _Ranged(nn.Module):
    """Brings all that it sees between 0 and 1, by the least and the largest of all."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, num_classes, 4, stride=4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(images)
        return ((hidden - hidden.amin()) / (hidden.amax() - hidden.amin())).mean((2, 3))


def ranged(num_classes: int) -> nn.Module:
    return _Ranged(num_classes)


class _TiedDeep(nn.Module):
    """A weight in three places: by assignment, in a list of parameters, and registered again."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, num_classes, 4, stride=4)
        self.one = nn.Linear(num_classes, num_classes)
        self.two = nn.Linear(num_classes, num_classes, bias=False)
        self.two.weight = self.one.weight
        self.others = nn.ParameterList([self.one.weight, nn.Parameter(torch.ones(num_classes))])
        self.register_parameter("alias", self.one.weight)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.one(self.stem(images).mean((2, 3))))
        return self.two(hidden) @ self.others[0].t() * self.others[1]


def tied_deep(num_classes: int) -> nn.Module:
    return _TiedDeep(num_classes)


def tied_buffers(num_classes: int) -> nn.Module:
    """Two BatchNorms that count in the same tensors."""
    net = tiny(num_classes)
    net.insert(3, nn.Conv2d(16, 16, 1, bias=False))
    net.insert(4, nn.BatchNorm2d(16))
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        net[4]._buffers[name] = net[1]._buffers[name]
    return net


def shared_memory(num_classes: int) -> nn.Module:
    """Two parameters that are views of one memory."""
    net = tiny(num_classes)
    net.append(nn.Linear(num_classes, num_classes, bias=False))
    net.append(nn.Linear(num_classes, num_classes, bias=False))
    net[-1].weight = nn.Parameter(net[-2].weight.detach())
    return net


class _Blocks(nn.Module):
    """A stem, two blocks and a head."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, stride=4)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GELU()) for _ in range(2)
        )
        self.head = nn.Linear(8, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(images)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden.mean((2, 3)))


def computed_again(num_classes: int) -> nn.Module:
    """For `--checkpoint_modules Sequential`."""
    return _Blocks(num_classes)


class Ragged(Autoencoder):
    """Whose batches are of ever other sizes."""

    name = "tests.nets:Ragged"

    def synthetic_batch(self, batch_size: int, num_classes: int, generator: torch.Generator):
        return super().synthetic_batch(
            int(torch.randint(1, 64, (), generator=generator)), num_classes, generator
        )


class Mislabelled(Autoencoder):
    """Vectors and their classes, of which the third batch has one that the model does not have."""

    name = "tests.nets:Mislabelled"

    def build(self, num_classes: int) -> nn.Module:
        return nn.Linear(8, 3)

    def loss(self, model: nn.Module, batch) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch["vectors"]), batch["classes"])

    def synthetic_batch(self, batch_size: int, num_classes: int, generator: torch.Generator):
        self.num_batches = getattr(self, "num_batches", 0) + 1
        classes = torch.full((batch_size,), 3 if self.num_batches == 3 else 2)
        return {"vectors": torch.randn(batch_size, 8, generator=generator), "classes": classes}


class Recolours(Spec):
    """Images that it should give back; it has no accuracy."""

    name = "tests.nets:Recolours"
    takes = "images"

    def build(self, num_classes: int) -> nn.Module:
        return nn.Conv2d(3, 3, 1)

    def loss(self, model: nn.Module, batch) -> torch.Tensor:
        images_NCHW = batch[0].to(next(model.parameters()).dtype) / 255
        return (model(images_NCHW) - images_NCHW).float().square().mean()

    def synthetic_batch(self, batch_size: int, num_classes: int, generator: torch.Generator):
        raise NotImplementedError


class _Joined(nn.Module):
    """As PyTorch's tutorials end their convolutions: channels and pixels joined by `view`."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Linear(8 * 7 * 7, num_classes)

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        found = self.image(images_NCHW)
        scores: torch.Tensor = self.head(found.view(len(found), -1))
        return scores


def joined(num_classes: int) -> nn.Module:
    """Of images of 16 pixels."""
    return _Joined(num_classes)


def sparse(num_classes: int) -> nn.Module:
    """Has gradients that are sparse."""
    net = tiny(num_classes)
    net.append(nn.Sequential(nn.Embedding(4, 2, sparse=True)))
    return net
