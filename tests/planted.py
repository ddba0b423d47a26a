"""Engines with a planted fault, as a package of someone else's: found by its entry points.

`install(FOLDER)` writes the package's metadata; with FOLDER on PYTHONPATH the engines
are there under these names.
"""

import dataclasses
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accbench.engines import ddp


def install(folder: Path) -> Path:
    """Returns `folder`."""
    info = folder / "planted_engines-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted-engines\nVersion: 1.0\n")
    lines = [f"{name} = tests.planted:{class_.__name__}" for name, class_ in NAMES.items()]
    (info / "entry_points.txt").write_text("\n".join(["[accbench.engines]", *lines, ""]))
    return folder


class Slowed(ddp.Engine):
    """Sleeps a tenth of what each step took."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._ended = time.perf_counter()

    def end_step(self) -> None:
        time.sleep(0.1 * (time.perf_counter() - self._ended))
        self._ended = time.perf_counter()


class Crashes(ddp.Engine):
    """Cannot place the model."""

    def prepare(self, model: nn.Module) -> nn.Module:
        raise RuntimeError("planted crash")


class Frozen(ddp.Engine):
    """Computes all and leaves the step out."""

    def apply_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        pass


class CrashesWhenLoaded(ddp.Engine):
    """Trains well, but the numerics pass ends with an error."""

    def load_training_state(self, *args: Any) -> None:
        raise OSError("planted crash")


class Planted(ddp.Engine):
    """Counts its steps, and gives faults a place each."""

    num_steps = 0
    since_load = 0

    def run_step(self, step, model, spec, optimizer, batch):
        self.num_steps += 1
        self.since_load += 1
        return super().run_step(step, model, self.spec(spec), optimizer, self.batch(batch))

    def load_training_state(self, *args: Any) -> None:
        self.since_load = 0
        super().load_training_state(*args)

    def spec(self, spec):
        return spec

    def batch(self, batch):
        return batch

    def apply_gradients(self, optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.change([p for p in parameters if p.grad is not None])
        super().apply_gradients(optimizer)

    def change(self, parameters: list[nn.Parameter]) -> None:
        """Gradients before the optimizer sees them."""

    def prepare(self, model: nn.Module) -> nn.Module:
        for module in model.modules():
            self.module(module)
        return super().prepare(model)

    def module(self, module: nn.Module) -> None:
        """Each module before it is wrapped."""


def scaled(factor: float) -> type:
    class Scaled(Planted):
        def change(self, parameters):
            for parameter in parameters:
                parameter.grad.mul_(factor)

    return Scaled


# Gradients


class OneTensorScaled(Planted):
    def change(self, parameters):
        max(parameters, key=torch.Tensor.numel).grad.mul_(0.8)


class OneTensorTurned(Planted):
    def change(self, parameters):
        parameters[len(parameters) // 2].grad.neg_()


class BiasesDropped(Planted):
    def change(self, parameters):
        for parameter in parameters:
            if parameter.dim() == 1:
                parameter.grad.zero_()


class Stale(Planted):
    _before: Any = None

    def change(self, parameters):
        now = [parameter.grad.clone() for parameter in parameters]
        for parameter, gradient in zip(parameters, self._before or now, strict=True):
            parameter.grad.copy_(gradient)
        self._before = now


class NeverZeroed(Planted):
    def build_optimizer(self, model):
        optimizer = super().build_optimizer(model)
        optimizer.zero_grad = lambda set_to_none=True: None
        return optimizer


class Clipped(Planted):
    def change(self, parameters):
        nn.utils.clip_grad_norm_(parameters, 0.5)


class Noisy(Planted):
    def change(self, parameters):
        for parameter in parameters:
            parameter.grad.mul_(1 + 0.1 * torch.randn_like(parameter.grad))


class Compressed(Planted):
    """Gradients travel in bfloat16."""

    def change(self, parameters):
        for parameter in parameters:
            parameter.grad.copy_(parameter.grad.bfloat16())


# The loop


class SkipsThird(Planted):
    def apply_gradients(self, optimizer):
        if self.num_steps != 3:
            super().apply_gradients(optimizer)


class StopsAfterFive(Planted):
    def apply_gradients(self, optimizer):
        if self.num_steps <= 5:
            super().apply_gradients(optimizer)


class AppliesTwice(Planted):
    def apply_gradients(self, optimizer):
        super().apply_gradients(optimizer)
        optimizer.step()


class SkipsWhenAlone(Planted):
    """Every third step of those in which nobody looks."""

    def apply_gradients(self, optimizer):
        if self.since_load % 3:
            super().apply_gradients(optimizer)


class HalvedWhenAlone(Planted):
    """Half the learning rate where nothing was loaded before the step."""

    def apply_gradients(self, optimizer):
        for group in optimizer.param_groups:
            group["lr"] = self.task.lr * (0.5 if self.since_load > 1 else 1.0)
        super().apply_gradients(optimizer)


class WrongLabelsFromEight(Planted):
    def batch(self, batch):
        return (batch[0], batch[1].roll(1)) if self.num_steps >= 8 else batch


class BatchTwice(Planted):
    _before: Any = None

    def batch(self, batch):
        used = self._before if self.num_steps % 2 == 0 else batch
        self._before = batch
        return used


class Mirrored(Planted):
    def batch(self, batch):
        return (batch[0].flip(3), batch[1])


class NotLoaded(Planted):
    """Keeps what it has when it is given a state."""

    def load_training_state(self, *args: Any) -> None:
        return


# The loss


@dataclasses.dataclass
class _OtherLoss:
    spec: Any
    smoothing: float = 0.0
    first: int = 0

    def loss(self, model, batch):
        if self.first:
            batch = tuple(tensor[: -self.first] for tensor in batch)
        if not self.smoothing:
            return self.spec.loss(model, batch)
        logits = model(batch[0])
        return nn.functional.cross_entropy(logits, batch[1], label_smoothing=self.smoothing)


class Smoothed(Planted):
    def spec(self, spec):
        return _OtherLoss(spec, smoothing=0.1)


class LastSampleLeftOut(Planted):
    def spec(self, spec):
        return _OtherLoss(spec, first=1)


# The optimizer


_OF_AMSGRAD = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


def with_options(**options: Any) -> type:
    class WithOptions(Planted):
        def build_optimizer(self, model):
            optimizer = super().build_optimizer(model)
            for group in optimizer.param_groups:
                group.update(options)
                for parameter in group["params"] if options.get("amsgrad") else ():
                    optimizer.state[parameter] = {
                        "step": torch.zeros(()),
                        **{name: torch.zeros_like(parameter) for name in _OF_AMSGRAD},
                    }
            return optimizer

    return WithOptions


class RateOff(Planted):
    def build_optimizer(self, model):
        optimizer = super().build_optimizer(model)
        for group in optimizer.param_groups:
            group["lr"] *= 1.01
        return optimizer


class Coupled(Planted):
    """Adam's L2 penalty in place of AdamW's decay."""

    def change(self, parameters):
        for parameter in parameters:
            parameter.grad.add_(parameter.detach(), alpha=self.task.weight_decay)


class Rounded(Planted):
    """Weights kept in bfloat16."""

    def apply_gradients(self, optimizer):
        super().apply_gradients(optimizer)
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.copy_(parameter.bfloat16())


class FirstFrozen(Planted):
    def prepare(self, model):
        next(model.parameters()).requires_grad_(False)
        return super().prepare(model)


def of_another_task(**changes: Any) -> type:
    """Trains as if other flags had been given."""

    class OfAnotherTask(Planted):
        def __init__(self, task, *others):
            super().__init__(dataclasses.replace(task, **changes), *others)

    return OfAnotherTask


class AverageLeftOut(Planted):
    def build_optimizer(self, model):
        optimizer = super().build_optimizer(model)
        optimizer._optimizer_step_post_hooks.clear()
        return optimizer


class FirstPartLeftOut(Planted):
    """Gradients of a step's parts are overwritten and not added up."""

    num_parts = 0

    def backward(self, loss):
        self.num_parts += 1
        super().backward(loss * (self.num_parts % self.task.accumulate == 0))


# Layers


def of_batchnorm(**settings: Any) -> type:
    class OfBatchNorm(Planted):
        def module(self, module):
            if isinstance(module, nn.BatchNorm2d):
                for name, value in settings.items():
                    setattr(module, name, value)

    return OfBatchNorm


class Leaky(Planted):
    def module(self, module):
        for name, child in module.named_children():
            if isinstance(child, nn.ReLU):
                setattr(module, name, nn.LeakyReLU(0.01))


class Brighter(Planted):
    """Images scaled by half a hundredth too much."""

    def module(self, module):
        if hasattr(module, "scale"):
            module.scale.mul_(1.005)


class EvaluatesInTrainingMode(Planted):
    def prepare(self, model):
        prepared = super().prepare(model)
        prepared.eval = prepared.train
        return prepared


# Dropout


def dropping(factor: float) -> type:
    class Dropping(Planted):
        def module(self, module):
            if isinstance(module, nn.Dropout):
                module.p *= factor

    return Dropping


class DropsTheSame(Planted):
    def run_step(self, *args):
        torch.manual_seed(self.topology.rank)
        return super().run_step(*args)


class DropsTheSameOnAllRanks(Planted):
    def run_step(self, *args):
        torch.manual_seed(self.num_steps)
        return super().run_step(*args)


# Several ranks


class NotAveraged(Planted):
    """Every rank keeps its own gradients; the proof at the start still goes well."""

    def prepare(self, model: nn.Module) -> nn.Module:
        return model.to(self.device)


class Summed(Planted):
    def change(self, parameters):
        for parameter in parameters:
            parameter.grad.mul_(self.topology.world_size)


class OwnReduction(NotAveraged):
    """Averages by itself."""

    def change(self, parameters):
        for index, parameter in enumerate(parameters):
            self.reduce(index / len(parameters), parameter.grad)

    def reduce(self, place: float, gradient: torch.Tensor) -> None:
        dist.all_reduce(gradient)
        gradient /= self.topology.world_size


class BucketLeftOut(OwnReduction):
    def reduce(self, place, gradient):
        if not 0.5 <= place < 0.7:
            super().reduce(place, gradient)


class OnlyRank0(OwnReduction):
    def reduce(self, place, gradient):
        dist.broadcast(gradient, src=0)


class BucketOfRank0(OwnReduction):
    """As the one that is left out, but the same on all ranks."""

    def reduce(self, place, gradient):
        if 0.5 <= place < 0.7:
            dist.broadcast(gradient, src=0)
        else:
            super().reduce(place, gradient)


class SameData(Planted):
    def batch(self, batch):
        batch = tuple(tensor.contiguous().clone() for tensor in batch)
        for tensor in batch:
            dist.broadcast(tensor, src=0)
        return batch


class StatisticsShared(Planted):
    """BatchNorm's statistics are averaged over the ranks."""

    def apply_gradients(self, optimizer):
        super().apply_gradients(optimizer)
        for buffer in self._buffers:
            dist.all_reduce(buffer)
            buffer /= self.topology.world_size

    def prepare(self, model):
        prepared = super().prepare(model)
        self._buffers = [b for n, b in prepared.named_buffers() if "running" in n]
        return prepared


# name -> class. What is found with one worker, what needs dropout or a tied weight, and
# what needs several workers.
ALWAYS = {
    "times_0_9": scaled(0.9), "times_1_1": scaled(1.1), "times_0_99": scaled(0.99),
    "one_tensor_scaled": OneTensorScaled, "one_tensor_turned": OneTensorTurned,
    "biases_dropped": BiasesDropped, "stale": Stale, "never_zeroed": NeverZeroed,
    "clipped": Clipped, "noisy": Noisy, "compressed": Compressed,
    "skips_third": SkipsThird, "stops_after_five": StopsAfterFive, "applies_twice": AppliesTwice,
    "skips_when_alone": SkipsWhenAlone, "halved_when_alone": HalvedWhenAlone,
    "wrong_labels": WrongLabelsFromEight, "batch_twice": BatchTwice, "mirrored": Mirrored,
    "smoothed": Smoothed, "last_left_out": LastSampleLeftOut,
    "wrong_epsilon": with_options(eps=1e-6), "beta2_0_99": with_options(betas=(0.9, 0.99)),
    "no_decay": with_options(weight_decay=0.0), "amsgrad": with_options(amsgrad=True),
    "rate_off": RateOff, "coupled_decay": Coupled, "rounded": Rounded,
    "first_frozen": FirstFrozen, "brighter": Brighter,
}  # fmt: skip
OF_CONVOLUTIONS = {
    "bn_momentum": of_batchnorm(momentum=0.11), "bn_epsilon": of_batchnorm(eps=1e-3),
    "bn_untracked": of_batchnorm(momentum=0.0), "leaky": Leaky,
    "evaluates_in_training": EvaluatesInTrainingMode,
}  # fmt: skip
OF_DROPOUT = {
    "dropout_off": dropping(0.0), "dropout_halved": dropping(0.5), "drops_the_same": DropsTheSame,
}  # fmt: skip
OF_RANKS = {
    "not_averaged": NotAveraged, "summed": Summed, "bucket_left_out": BucketLeftOut,
    "bucket_of_rank0": BucketOfRank0, "only_rank0": OnlyRank0, "same_data": SameData,
    "statistics_shared": StatisticsShared, "drops_the_same_on_all": DropsTheSameOnAllRanks,
}  # fmt: skip
# With the flags of a whole recipe; optimizers' own beside them.
OF_RECIPES = {
    "not_clipped": of_another_task(clip_norm=None),
    "clipped_lower": of_another_task(clip_norm=0.09),
    "part_left_out": FirstPartLeftOut, "in_one_part": of_another_task(accumulate=1),
    "all_decay": of_another_task(decay="all"), "average_left_out": AverageLeftOut,
    "average_of_another_rate": of_another_task(ema_decay=0.89),
}  # fmt: skip
OF_SGD = {
    "momentum_off": of_another_task(momentum=0.88),
    "not_nesterovs": of_another_task(nesterov=False),
}
OTHERS = {
    "slowed": Slowed, "crashes": Crashes, "crashes_when_loaded": CrashesWhenLoaded,
    "not_loaded": NotLoaded, "frozen": Frozen,
}  # fmt: skip
NAMES = {**ALWAYS, **OF_CONVOLUTIONS, **OF_DROPOUT, **OF_RANKS, **OF_RECIPES, **OF_SGD, **OTHERS}
# Entry points name attributes of this module.
for _name, _class in NAMES.items():
    _class.__name__ = _class.__qualname__ = f"{_class.__name__}_{_name}"
    globals()[_class.__name__] = _class
