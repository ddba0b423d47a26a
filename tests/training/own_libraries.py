"""Models of other libraries in loops of one's own, by their own classes, all in one process.

    python -m tests.training.own_libraries ENGINE FOLDER [MODEL ...]

Writes JSON to FOLDER/found.json: model -> losses, those of the plain loop, and how far the weights
are from its; the types of outputs under autocast; and where batches of own kinds come.
"""

import copy
import dataclasses
import json
import sys
from collections import UserList, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import accbench
from tests.training import library_models

LABELS = torch.tensor([0, 1, 2, 0])
STEPS = 2


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    """As the libraries' own scripts take it."""
    if not isinstance(batch, list):
        loss: torch.Tensor = model(**batch).loss
        return loss
    images, labels = batch
    return functional.cross_entropy(model(images), labels)


def train(
    model: nn.Module, optimizer: Any, loader: Any, backward: Callable[[torch.Tensor], None]
) -> list[float]:
    losses = []
    for batch in loader:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def far(model: nn.Module, plain: nn.Module, before: dict[str, torch.Tensor]) -> float:
    """How far the updates are from the plain loop's, by the size of the largest of those."""
    pairs = [(model.state_dict()[name].cpu(), value) for name, value in plain.state_dict().items()]
    size = max(
        float((value - before[name]).abs().max()) for name, value in plain.state_dict().items()
    )
    return max(float((own - value).abs().max()) for own, value in pairs) / size


def run_of(model: nn.Module, loader: Any, engine: str, amp_level: str, folder: Path) -> Any:
    return accbench.accelerate(
        model, torch.optim.SGD(model.parameters(), 0.1), loader, engine=engine,
        amp_level=amp_level, device="cpu", tensorboard="off", output_dir=str(folder),
    )  # fmt: skip


def types_of_outputs(engine: str, folder: Path) -> list[str]:
    """Of all tensors that a model with a cache returns under autocast, and the outputs' own."""
    torch.manual_seed(0)
    model, batch = library_models.gpt2()
    run = run_of(model, [batch], engine, "O1", folder)
    for given in run.loaders[0]:
        outputs = model(**given)
        run.backward(outputs.loss)
        run.optimizer.step()
    run.close()
    (layer,) = outputs.past_key_values.layers
    tensors = [outputs.loss, outputs.logits, outputs["logits"], layer.keys, layer.values]
    return [type(outputs).__name__, *sorted({str(tensor.dtype) for tensor in tensors})]


@dataclasses.dataclass
class Output:
    scores: torch.Tensor
    hidden: list[torch.Tensor]


class Graphs:
    """A batch that moves itself."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.num_graphs = x, 2

    def to(self, device: torch.device) -> "Graphs":
        return Graphs(self.x.to(device))


class OfNests(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> Output:
        hidden = self.first(x)
        return Output(self.second(hidden), [hidden])


def nests(engine: str, folder: Path) -> dict[str, Any]:
    """Batches of kinds that torch's own loader does not make; outputs that are a dataclass."""
    model = OfNests()
    batches = [deque([torch.ones(4, 3)]), UserList([torch.ones(4, 3)]), [Graphs(torch.ones(4, 3))]]
    run = run_of(model, batches, engine, "O1", folder)
    kinds, devices, dtypes = [], set(), set()
    for (part,) in run.loaders[0]:
        run.optimizer.zero_grad()
        x = part.x if isinstance(part, Graphs) else part
        output = model(x)
        run.backward(output.scores.mean())
        run.optimizer.step()
        kinds.append(type(output).__name__)
        devices.add(x.device == run.device)
        dtypes |= {str(output.scores.dtype), str(output.hidden[0].dtype)}
    run.close()
    return {
        "kinds": kinds, "on_device": [*devices], "dtypes": [*dtypes],
        "samples": run.timer.num_samples,
    }  # fmt: skip


def trained(make: Callable[[], library_models.Made], engine: str, folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    own, batch = make()
    if isinstance(batch, torch.Tensor):
        batch = [batch, LABELS]
    plain, before = copy.deepcopy(own), copy.deepcopy(own.state_dict())
    loader = [batch] * STEPS
    run = run_of(own, loader, engine, "O0", folder / make.__name__)
    losses = train(*run, run.backward)
    run.close()
    expected = train(plain, torch.optim.SGD(plain.parameters(), 0.1), loader, torch.Tensor.backward)
    return {"losses": losses, "plain": expected, "far": far(own, plain, before)}


def main() -> None:
    engine, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    makers = [
        make for make in (*library_models.TRANSFORMERS, *library_models.TIMM)
        if not sys.argv[3:] or make.__name__ in sys.argv[3:]
    ]  # fmt: skip
    found = {make.__name__: trained(make, engine, folder) for make in makers}
    types = types_of_outputs(engine, folder / "autocast")
    of_nests = nests(engine, folder / "nests")
    report = {"trained": found, "types": types, "nests": of_nests}
    (folder / "found.json").write_text(json.dumps(report))


main()
