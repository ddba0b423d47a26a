"""Networks whose `state_dict()` holds more than parameters and buffers, or holds them otherwise.

For images of 8 pixels, as `--model tests.training.stateful:NAME`.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import accbench


class Counting(nn.Linear):
    """Counts its forward passes, and knows the mean of its last inputs."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(192, num_classes)
        self.forwards, self.mean = 0, torch.zeros(2)
        self.others: Any = {"names": ["a", ("b", None)], 3: 0.5}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        self.mean = x.detach().mean().repeat(2)
        return super().forward(x)

    def get_extra_state(self) -> Any:
        return {"forwards": self.forwards, "mean": self.mean, "others": self.others}

    def set_extra_state(self, state: Any) -> None:
        self.forwards, self.mean, self.others = (state[k] for k in ("forwards", "mean", "others"))


class Scaling(nn.Linear):
    """Its forward pass depends on extra state that no forward pass changes."""

    def __init__(self, num_classes: int, scale: Any = 2.0) -> None:
        super().__init__(192, num_classes)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale

    def get_extra_state(self) -> Any:
        return self.scale

    def set_extra_state(self, state: Any) -> None:
        self.scale = state


class Holding(Scaling):
    """Of a class of its own."""

    def get_extra_state(self) -> Any:
        return {"scale": self.scale, "itself": [object()]}


class OneWay(nn.Linear):
    def get_extra_state(self) -> Any:
        return 1


class Renaming(nn.Linear):
    """Its weight has another name in what it saves, and no way back."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(192, num_classes)
        self._register_state_dict_hook(self._rename)

    @staticmethod
    def _rename(_module: Any, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        state[prefix + "kernel"] = state.pop(prefix + "weight")


class Dropping(Renaming):
    @staticmethod
    def _rename(_module: Any, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        del state[prefix + "weight"]


class Transposing(Renaming):
    """Saves its weight otherwise, under the same name, and takes it back."""

    @staticmethod
    def _rename(_module: Any, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        state[prefix + "weight"] = state[prefix + "weight"].t() * 2

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *others: Any) -> None:
        state[prefix + "weight"] = state[prefix + "weight"].t() / 2
        super()._load_from_state_dict(state, prefix, *others)


class Older(nn.Linear):
    """Has extra state as it was kept before there was `get_extra_state`."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(192, num_classes)
        self.steps = 7

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "steps"] = self.steps

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *others: Any) -> None:
        self.steps = state.pop(prefix + "steps")
        super()._load_from_state_dict(state, prefix, *others)


class Forgetting(Older):
    """Without the way back."""

    _load_from_state_dict = nn.Linear._load_from_state_dict


class Plainly(Scaling):
    """Its `state_dict` takes no arguments."""

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return {"w": self.weight, "b": self.bias}


class Types(nn.Linear):
    """Buffers of types that few know, one that is not there yet, one that is not saved."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(192, num_classes)
        for dtype in ("bool", "int16", "complex64", "float8_e4m3fn", "float64"):
            made = torch.rand(3).to(getattr(torch, dtype))
            self.register_buffer(dtype, made)
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("later", None)
        self.register_buffer("unsaved", torch.rand(2), persistent=False)
        self.register_buffer("expanded", torch.rand(1).expand(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return super().forward(x)


def built(kind: Any) -> Any:
    def build(num_classes: int) -> nn.Module:
        head = kind(192, num_classes) if kind is OneWay else kind(num_classes)
        return nn.Sequential(nn.Flatten(), head)

    return build


counting, scaling, holding, one_way = map(built, (Counting, Scaling, Holding, OneWay))
renaming, dropping, transposing = map(built, (Renaming, Dropping, Transposing))
older, forgetting, plainly, types = map(built, (Older, Forgetting, Plainly, Types))


def normed(num_classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(192, num_classes))
    )


def all_of_them(num_classes: int) -> nn.Module:
    """All that can be saved, one behind the other in a sum."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            kinds = counting, scaling, renaming, transposing, older, types, normed
            self.nets = nn.ModuleList(kind(num_classes) for kind in kinds)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([net(x) for net in self.nets]).sum(0)

    return Sum()


def main() -> None:
    """As one of several workers, begin with other state than rank 0; print what `accelerate` makes.

    python -m tests.training.stateful ENGINE FOLDER
    """
    engine, folder = sys.argv[1:]
    rank = int(os.environ["RANK"])
    torch.manual_seed(rank)
    net = all_of_them(3)
    net.nets[0][1].forwards = 10 + rank  # type: ignore[index]
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    run = accbench.accelerate(
        net, optimizer, engine=engine, device="cpu", tensorboard="off", output_dir=folder
    )
    state = {
        name: value.double().real.sum().item() if isinstance(value, torch.Tensor) else repr(value)
        for name, value in [*net.state_dict().items(), *net.named_buffers()]
        if "extra" not in name or "nets.0" in name
    }
    run.backward(net(torch.ones(2, 3, 8, 8)).sum())
    optimizer.step()
    Path(f"{folder}-rank{rank}.json").write_text(json.dumps(state))


if __name__ == "__main__":
    main()
