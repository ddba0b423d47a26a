"""The one training loop, for training and for measuring. It knows only engines' contracts."""

from collections.abc import Callable
from contextlib import closing
from typing import Any

import torch
from torch import nn

from accbench.data import nested
from accbench.distributed.process_group import all_gather_values
from accbench.engines import Batch, Engine
from accbench.engines.loops import LoopEngine
from accbench.errors import RequestError
from accbench.recording.records import EvalRecord, finite_or_none
from accbench.training.label_counts import LabelCounts
from accbench.training.step_timer import StepTimer


def train_step(
    engine: LoopEngine, model: nn.Module, spec: Any, optimizer: torch.optim.Optimizer, batch: Batch
) -> torch.Tensor:
    """Do one optimizer step, and return the loss on the device without waiting for it."""
    optimizer.zero_grad(set_to_none=True)
    copies = engine.precision.copy_buffers(model)
    parts = nested.chunks(batch, engine.task.accumulate)
    loss = engine.compute_gradients(model, spec, parts)
    engine.apply_gradients(optimizer)
    engine.precision.restore_buffers(copies)
    engine.end_step()
    return loss


def train_epoch(
    engine: Engine, model: nn.Module, spec: Any, optimizer: torch.optim.Optimizer,
    loader: Any, labels: LabelCounts, timer: StepTimer, epoch: int,
    after_step: Callable[[int], None],
) -> bool:  # fmt: skip
    """Train over the loader once, or until `--max_steps`; return whether the epoch is complete.

    Args:
        engine: the engine that trains.
        model: the prepared model.
        spec: the model's spec, which has the loss.
        optimizer: the model's optimizer.
        loader: the training loader.
        labels: counts the labels in its batches.
        timer: times the steps.
        epoch: the epoch's number, from 0.
        after_step: called with the number of batches done, while the device is at work.
    """
    if _overrides_train(model):  # it may read and write tensors, as that of LoRA's layers does
        engine.gather_state()
    model.train()
    loader.set_epoch(epoch)
    num_batches = len(loader)
    timer.start(epoch)
    with closing(labels.device_batches(loader)) as batches:
        num_done = 0
        for batch in timer.batches(batches):
            timer.step_done(engine.run_step(train_step, model, spec, optimizer, batch))
            num_done += 1
            after_step(num_done)
            if timer.num_steps == engine.task.max_steps:
                break
    timer.close_window()
    return num_done == num_batches


def _overrides_train(model: nn.Module) -> bool:
    methods = (type(module).train for module in model.modules())
    return not all((method.__module__ or "").startswith("torch.") for method in methods)


@torch.no_grad()
def evaluate(
    engine: Engine, model: nn.Module, spec: Any, loader: Any, epoch: int,
    is_stopped: Callable[[], bool] = lambda: False,
) -> EvalRecord | None:  # fmt: skip
    """Score the validation set: loss, and accuracy if the task has one; each rank its part.

    Args:
        engine: the engine that trains.
        model: the prepared model.
        spec: the model's spec, which has the scores.
        loader: the validation loader.
        epoch: the epoch's number, from 0.
        is_stopped: asked before each batch whether to stop; where ranks evaluate together it
            returns the same on all of them.

    Returns:
        The scores; None if a rank stopped before its last batch.

    Raises:
        RequestError: ranks have to evaluate together, and one of them has no sample.
    """
    model.eval()
    sums: torch.Tensor | None = None
    missing = _num_missing_batches(loader) if engine.evaluates_together else 0
    stopped = False
    with closing(engine.device_batches(loader)) as batches:
        for batch in batches:
            if stopped := is_stopped():
                break
            score = engine.run_score(model, spec, batch)
            sums = score if sums is None else sums + score
            engine.end_step()
    for _ in range(missing):  # the others wait for this rank's forward pass
        if stopped := stopped or is_stopped():
            break
        engine.run_score(model, spec, batch)
    # float64 on the host; a rank without samples adds nothing
    local_sums = [0.0] * 4 if sums is None else sums.cpu().double().tolist()
    loss, top1, top5, num_samples, num_stopped = (
        sum(values)
        for values in zip(*all_gather_values([*local_sums, float(stopped)]), strict=True)
    )
    if num_stopped:
        return None

    def mean(total: float) -> float | None:
        return finite_or_none(total / num_samples) if num_samples else None

    shape = engine.mesh  # ranks with the same tokens have all scored them
    num_scored = int(num_samples) * shape.num_token_ranks // shape.world_size
    return EvalRecord(epoch, mean(loss), mean(top1), mean(top5), num_scored)


def _num_missing_batches(loader: Any) -> int:
    """Return how many batches fewer this rank has than the one that has most; all ranks call it."""
    numbers = [int(number) for (number,) in all_gather_values([float(len(loader))])]
    if max(numbers) and not min(numbers):
        raise RequestError(
            f"the validation set has samples for {sum(map(bool, numbers))} of {len(numbers)} "
            "workers, which evaluate a sharded model together; use fewer workers, more samples, "
            "or --eval_interval 0"
        )
    return max(numbers) - len(loader)
