"""Pipelines: micro-batches through a model's stages, by torch's schedules.

torch.distributed.pipelining orders the micro-batches and sends between stages. It would infer what
stages exchange by training steps of its own, and so is told, by one forward pass to evaluate for
each shape of a batch (`Pipeline.forward`).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from accbench.data import nested
from accbench.engines.common.pipeline_stages import StagedModel

_SCHEDULES: dict[str, Any] = {
    "1f1b": Schedule1F1B, "gpipe": ScheduleGPipe, "interleaved": ScheduleInterleaved1F1B
}  # fmt: skip
_Call = Callable[[Any], torch.Tensor]
"""Calls the model with a batch, and computes with what it returns."""
_Tensors = dict[int, torch.Tensor]


class _Stage(nn.Module):
    """One stage as torch's schedules call it, with a micro-batch's number."""

    def __init__(self, compute: Callable[[int, torch.Tensor | None], torch.Tensor]) -> None:
        super().__init__()
        self._compute = compute

    def forward(self, *received: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return what the next stage receives, or the loss, (1,), of the last one."""
        return self._compute(int(index), received[0] if received else None)


class Pipeline:
    """Runs the stages of a model together with the ranks that have its other stages.

    Args:
        net: the model that was cut.
        staged: how it was cut.
        own_stages: the stages of this rank.
        group: the ranks that have its stages, in order.
        device: this rank's.
        schedule: 1f1b, gpipe or interleaved.
        num_parts: micro-batches of a step.
    """

    def __init__(
        self, net: nn.Module, staged: StagedModel, own_stages: list[int],
        group: dist.ProcessGroup, device: torch.device, schedule: str, num_parts: int,
    ) -> None:  # fmt: skip
        self.net, self.staged, self.own_stages = net, staged, own_stages
        self.group, self.device = group, device
        self._schedule_class, self._num_parts = _SCHEDULES[schedule], num_parts
        self._parts: list[Any] = []
        self._call: _Call | None = None
        self._sent: dict[Any, _Tensors] = {}
        self._schedules: dict[Any, Any] = {}

    def step(self, call: _Call, parts: list[Any]) -> torch.Tensor:
        """Compute gradients of the sum of the micro-batches' losses, and return it, on all ranks.

        Args:
            call: returns a micro-batch's loss, ().
            parts: the micro-batches.
        """
        key = _key(parts[0])
        if key not in self._schedules:
            self._schedules[key] = self._build_schedule(self._sent_of(call, parts[0]))
        self._call, self._parts = call, parts
        losses: list[torch.Tensor] = []
        numbers = torch.arange(len(parts))
        try:
            self._schedules[key].step(index=numbers, target=numbers, losses=losses)
        except RuntimeError as error:  # torch wraps what a stage raises in all of its inputs
            raise (error.__cause__ or error) from None
        finally:
            self._call, self._parts = None, []
        return self._of_last(torch.stack(losses).sum().detach() if losses else None, ())

    def forward(self, call: _Call, batch: Any, shape: tuple[int, ...]) -> torch.Tensor:
        """Return what `call` returns on the last stage, on all ranks, without gradients.

        Args:
            call: see `step`; returns real numbers.
            batch: the same on all ranks of this pipeline.
            shape: of what it returns.
        """
        sent = self._sent_of(call, batch)
        result = None
        with torch.no_grad():
            for stage in self.own_stages:
                result = self._forward_stage(stage, call, batch, sent)
        return self._of_last(result if self.own_stages[-1] == self._last else None, shape)

    @property
    def _last(self) -> int:
        return self.staged.num_stages - 1

    def _rank_of(self, stage: int) -> int:
        return stage % self.group.size()

    def _forward_stage(self, stage: int, call: _Call, batch: Any, sent: _Tensors) -> torch.Tensor:
        received = None
        if stage:
            received = torch.empty_like(sent[stage - 1], device=self.device)
            dist.recv(received, group=self.group, group_src=self._rank_of(stage - 1))
        result = self.staged.run.compute(stage, received, lambda: call(batch))
        if stage < self._last:
            dist.send(result, group=self.group, group_dst=self._rank_of(stage + 1))
        return result

    def _of_last(self, result: torch.Tensor | None, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the last stage's result on all ranks, in float64, which has all others."""
        shared = torch.empty(shape, dtype=torch.float64, device=self.device)
        if result is not None:
            shared.copy_(result.reshape(shape))
        dist.broadcast(shared, group=self.group, group_src=self._rank_of(self._last))
        return shared

    def _sent_of(self, call: _Call, batch: Any) -> _Tensors:
        """Return what each stage but the last sends of such a batch, on the device meta."""
        key = _key(batch)
        if key in self._sent:
            return self._sent[key]
        modes = {module: module.training for module in self.net.modules()}
        self.net.eval()  # draws no random numbers, and counts nothing
        sent: _Tensors = {}
        hidden: torch.Tensor | None = None
        try:
            for stage in range(self._last):
                rank = self._rank_of(stage)
                if stage in self.own_stages:
                    received = None
                    if stage:
                        received = torch.zeros_like(sent[stage - 1], device=self.device)
                    with torch.no_grad():
                        hidden = self.staged.run.compute(stage, received, lambda: call(batch))
                box: list[Any] = [None if hidden is None else (tuple(hidden.shape), hidden.dtype)]
                dist.broadcast_object_list(box, group=self.group, group_src=rank)
                shape, dtype = box[0]
                sent[stage] = torch.empty(shape, dtype=dtype, device="meta")
        finally:
            for module, mode in modes.items():
                module.training = mode
        self._sent[key] = sent
        return sent

    def _build_schedule(self, sent: _Tensors) -> Any:
        stages = [self._build_stage(stage, sent) for stage in self.own_stages]
        is_single = len(stages) == 1
        return self._schedule_class(
            stages[0] if is_single else stages, n_microbatches=self._num_parts,
            loss_fn=lambda output, _: output.sum(), scale_grads=False,
        )  # fmt: skip

    def _build_stage(self, stage: int, sent: _Tensors) -> PipelineStage:
        def compute(index: int, received: torch.Tensor | None) -> torch.Tensor:
            assert self._call is not None
            call = self._call
            result = self.staged.run.compute(stage, received, lambda: call(self._parts[index]))
            return result.reshape(1) if stage == self._last else result

        inputs = () if stage == 0 else (sent[stage - 1].clone().requires_grad_(),)
        loss = torch.empty(1, device="meta")
        outputs = sent.get(stage, loss).clone().requires_grad_()
        return PipelineStage(
            _Stage(compute), stage, self.staged.num_stages, self.device,
            input_args=inputs, output_args=(outputs,), group=self.group,
        )  # fmt: skip


def _key(batch: Any) -> tuple[Any, ...]:
    return (*((tuple(t.shape), t.dtype) for t in nested.tensors_of(batch)),)
