"""Loops of one's own whose batches hold indices that are out of range, or only seem to be.

    python -m tests.training.own_indices ENGINE FOLDER [CASE ...]

Writes JSON to FOLDER/found.json: case -> what was raised (class and message) or null, the number of
steps taken, and whether the weights are those of so many good steps of a plain loop. Without a CASE
it is all of them.
"""

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import accbench

WORDS, CLASSES, LENGTH = 7, 5, 4


class Tagger(nn.Module):
    """Words to the class of each, with places; the loss is the model's if it is given labels."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 4), nn.Embedding(LENGTH, 4)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, words: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        places = torch.arange(words.shape[1], device=words.device)
        scores = self.head(self.words(words) + self.places(places))
        if labels is None:
            return scores
        # As language models shift their labels: the first one counts for nothing.
        labels = functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
        return functional.cross_entropy(scores.flatten(0, 1), labels.view(-1).to(words.device))


def outside(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch["words"]).flatten(0, 1), batch["labels"].flatten())


def inside(model: nn.Module, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(batch["words"], batch["labels"])
    return loss


def picked(model: nn.Module, batch: Any) -> torch.Tensor:
    """By gather and by an index; labels are bytes, and -1 is clamped away before."""
    labels = batch["labels"].to(torch.int8).long().clamp(min=0)
    scores = model(batch["words"]).log_softmax(-1)
    by_gather = scores.gather(2, labels[..., None]).mean()
    flat = scores.flatten(0, 1)
    return -by_gather - flat[torch.arange(len(flat), device=flat.device), labels.flatten()].mean()


def offset(model: nn.Module, batch: Any) -> torch.Tensor:
    """Labels that are written to before they are taken."""
    labels = batch["labels"].clone()
    labels[labels == 99] = -100
    labels += 1
    labels.sub_(1)
    return functional.cross_entropy(model(batch["words"]).flatten(0, 1), labels.flatten())


def put(what: str, place: tuple[int, int], value: int, of_batch: int = 2) -> Callable[[Any], None]:
    def change(batches: list[Any]) -> None:
        batches[of_batch][what][place] = value

    return change


def longer(batches: list[Any]) -> None:
    for name in ("words", "labels"):
        batches[2][name] = torch.ones(2, LENGTH + 1).long()


# case -> (the loss, what is done to three batches, whether it is wrong)
CASES: dict[str, tuple[Callable[..., torch.Tensor], Callable[[Any], None], bool]] = {
    "label": (outside, put("labels", (0, 1), CLASSES), True),
    "label at once": (outside, put("labels", (0, 1), CLASSES, 0), True),
    "negative label": (outside, put("labels", (1, 1), -3), True),
    "ignored label": (outside, put("labels", (0, 1), -100), False),
    "label of the model": (inside, put("labels", (0, 1), CLASSES), True),
    "label of the model at once": (inside, put("labels", (0, 1), CLASSES, 0), True),
    "ignored label of the model": (inside, put("labels", (0, 1), -100), False),
    "label that is shifted away": (inside, put("labels", (0, 0), 99), False),
    "written to": (offset, put("labels", (0, 1), CLASSES), True),
    "written over": (offset, put("labels", (0, 1), 99), False),
    "word": (outside, put("words", (1, 2), WORDS), True),
    "picked": (picked, put("labels", (0, 1), CLASSES), True),
    "clamped": (picked, put("labels", (0, 1), -1), False),
    "longer than places": (outside, longer, True),
}


def batches_of(change: Callable[[Any], None]) -> list[Any]:
    made = [
        {"words": torch.randint(WORDS, (2, LENGTH)), "labels": torch.randint(CLASSES, (2, LENGTH))}
        for _ in range(3)
    ]
    change(made)
    return made


def trained(case: str, engine: str, folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    torch._dynamo.reset()  # which compiles one class so many times, and then no more
    loss_of, change, _ = CASES[case]
    own, batches = Tagger(), batches_of(change)
    plain = copy.deepcopy(own)
    run = accbench.accelerate(
        own, torch.optim.SGD(own.parameters(), 0.5), batches, engine=engine, device="cpu",
        tensorboard="off", output_dir=str(folder / case.replace(" ", "_")),
    )  # fmt: skip
    error = _steps(own, run.optimizer, run.loaders[0], loss_of, run.backward)
    num_steps = run.timer.num_steps
    if error is None:
        run.close()
    else:
        run.fail(error)
    expected = torch.optim.SGD(plain.parameters(), 0.5)
    _steps(plain, expected, batches[:num_steps], loss_of, torch.Tensor.backward)
    pairs = zip(own.parameters(), plain.parameters(), strict=True)
    far = max(float((a.detach().cpu() - b.detach()).abs().max()) for a, b in pairs)
    said = None if error is None else f"{type(error).__name__}: {error}"
    return {"error": said, "steps": num_steps, "far": far}


def _steps(
    model: nn.Module, optimizer: Any, loader: Any, loss_of: Callable[..., torch.Tensor],
    backward: Callable[[torch.Tensor], None],
) -> Exception | None:  # fmt: skip
    try:
        for batch in loader:
            optimizer.zero_grad()
            backward(loss_of(model, batch))
            optimizer.step()
    except Exception as error:
        return error
    return None


def main() -> None:
    engine, folder, *cases = sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]
    torch.set_num_threads(1)
    found = {case: trained(case, engine, folder) for case in cases or CASES}
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
