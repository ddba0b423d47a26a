"""Pipeline stages: a model's blocks, some of which each rank has, by a plan of names.

A plan is a list of names of modules and parameters in the order of the forward pass, of which one
ends in `.*`: the blocks, which are called one after the other, each with what the one before
returned. Names before it are the first stage's, names behind it the last one's. transformers' own
plans are taken where a model has no other.

Each stage runs the model's own forward pass. Blocks that come before its own do nothing, its first
block takes what it has received, and the pass ends where another stage's block would be called.
What the model computes before its blocks for all of them, such as positions, each stage computes
from the same batch. Weights that a stage has not are NaN there, without memory, so that a plan in a
wrong order cannot train.
"""

import bisect
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from accbench.errors import RequestError

PLAN_ATTRIBUTE = "pipeline_plan"
"""The attribute of a network, or of a module in it, that holds its plan."""


_CALLED_TWICE = "--pp: the model calls its blocks twice; leave --pp out"


class _StageEnd(Exception):
    """Ends a forward pass where the next stage's first block would be called."""

    def __init__(self, hidden: Any) -> None:
        super().__init__()
        self.hidden = hidden


class _NotComputed:
    """Stands for what blocks of earlier stages would return; the loop over blocks passes it on."""

    def __getitem__(self, index: Any) -> "_NotComputed":
        return self  # blocks may return tuples


class StageRun:
    """Has the blocks of one stage at a time compute, from what the stage before has sent.

    Args:
        bounds: each stage's first block, and the number of blocks.
    """

    def __init__(self, bounds: Sequence[int]) -> None:
        self.bounds = bounds
        self._stage: int | None = None
        self._has_begun = False
        self._received: torch.Tensor | None = None

    def compute(
        self, stage: int, received: torch.Tensor | None, call: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Run one stage of a forward pass.

        Args:
            stage: its number.
            received: what the stage before has returned; None for the first one.
            call: calls the model, and computes with what it returns.

        Returns:
            What `call` returns, of the last stage; what the next stage receives, of others.
        """
        self._stage, self._received, self._has_begun = stage, received, False
        try:
            result = call()
        except _StageEnd as end:
            return _as_sent(end.hidden)
        finally:
            self._stage = self._received = None
        if stage < len(self.bounds) - 2 or not self._has_begun:
            raise RequestError(
                "--pp: the model has not called its blocks, which pipeline_plan names"
            )
        return result

    def call_block(
        self, number: int, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a block if it is the present stage's.

        Args:
            number: the block's, of all blocks.
            call: computes it.
            args: its arguments.
            kwargs: its arguments by name.
        """
        if self._stage is None:
            raise RequestError(
                "--pp: a block is called outside of its stage; have --checkpoint_modules name the "
                "blocks or what is in them, not what holds them"
            )
        first, end = self.bounds[self._stage], self.bounds[self._stage + 1]
        if number < first:
            return _NotComputed()
        if number == end:
            _refuse_trained_arguments(args, kwargs)
            raise _StageEnd(args[0] if args else next(iter(kwargs.values()), None))
        if number > first:
            return call(*args, **kwargs)
        if self._has_begun:
            raise RequestError(_CALLED_TWICE)
        self._has_begun = True
        if self._received is None:
            return call(*args, **kwargs)
        if args:
            return call(self._received, *args[1:], **kwargs)
        return call(**{**kwargs, next(iter(kwargs)): self._received})


def _as_sent(hidden: Any) -> torch.Tensor:
    if not isinstance(hidden, torch.Tensor):
        raise RequestError(
            f"--pp: the model's blocks are called with {type(hidden).__name__} first, not with a "
            "tensor that the block before returned; leave --pp out"
        )
    if torch.is_grad_enabled() and not hidden.requires_grad:  # the next stage sends gradients
        hidden = hidden.detach().requires_grad_()
    return hidden.contiguous()


def _refuse_trained_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    others = [*args[1:], *kwargs.values()] if args else [*kwargs.values()][1:]
    if any(isinstance(value, torch.Tensor) and value.requires_grad for value in others):
        raise RequestError(
            "--pp: the model's blocks share a tensor that is trained, beside what each returns to "
            "the next; leave --pp out"
        )


class _Block(nn.Module):
    """A block that computes in its own stage alone."""

    _pipeline_run: StageRun
    _pipeline_number: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the block, or do nothing, or end the stage."""
        return self._pipeline_run.call_block(self._pipeline_number, super().__call__, args, kwargs)


@dataclasses.dataclass(frozen=True)
class StagedModel:
    """A model of which a rank has some stages, and what it knows of the others."""

    run: StageRun
    owners: dict[str, int]
    """Parameter or buffer of the whole model, by its first name -> the stage that saves it."""
    shared: dict[str, tuple[int, ...]]
    """Parameter that several stages have, as it is tied -> these stages, in order."""
    blocks: list[nn.Module]
    """This rank's."""

    @property
    def num_stages(self) -> int:
        """Stages of the whole model."""
        return len(self.run.bounds) - 1


def find_plan(model: nn.Module) -> list[str]:
    """Return the plan of a network, or of the first module in it that has one; [] if none has."""
    for name, module in model.named_modules():
        plan = getattr(module, PLAN_ATTRIBUTE, None)
        if plan:
            prefix = f"{name}." if name else ""
            return [prefix + entry for entry in plan]
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        base_plan = getattr(config, "base_model_pp_plan", None)
        if base_plan:
            return _from_transformers(module, f"{name}." if name else "", base_plan)
    return []


def _from_transformers(module: nn.Module, prefix: str, base_plan: Any) -> list[str]:
    """Return a plan of transformers' in the form of one here; it names no blocks."""
    base = f"{prefix}{getattr(module, 'base_model_prefix', '')}."
    entries = [base + entry for entry in base_plan]
    entries = [
        f"{entry}.*"
        if isinstance(_attribute(module, entry[len(prefix) :]), nn.ModuleList)
        else entry
        for entry in entries
    ]
    return entries + [prefix + entry for entry in getattr(type(module), "_pp_plan", None) or {}]


def _attribute(module: nn.Module, path: str) -> Any:
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def cut(
    model: nn.Module, model_name: str, num_stages: int, own_stages: Sequence[int],
    device: torch.device,
) -> StagedModel:  # fmt: skip
    """Leave a rank its stages of a model, in place.

    Args:
        model: the whole model, the same on all ranks.
        model_name: for messages.
        num_stages: stages in all.
        own_stages: those of this rank.
        device: where it will compute.

    Raises:
        RequestError: the model has no plan, or one that does not fit.
    """
    plan = find_plan(model)
    if not plan:
        raise RequestError(
            f"--pp {num_stages // len(own_stages)}: --model {model_name} has no plan for it; use "
            f"--dp_shard, or give the network a {PLAN_ATTRIBUTE} (docs/parallel.md)"
        )
    path = _path_of_blocks(model, plan)
    container: Any = _attribute(model, path)
    num_blocks = len(container)
    if num_blocks < num_stages:
        raise RequestError(_too_few_blocks(model_name, num_blocks, num_stages, len(own_stages)))
    if len({*map(id, container)}) < num_blocks:
        raise RequestError(_CALLED_TWICE)
    bounds = [stage * num_blocks // num_stages for stage in range(num_stages + 1)]
    by_name = _StagesByName(plan, path, [*container._modules], bounds)
    stages = _stages_of_parameters(model, by_name)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    shared = {names[key]: (*sorted(of),) for key, of in stages.items() if len(of) > 1}
    _refuse_ties_of_blocks(path, shared, num_stages // len(own_stages))
    buffers = {name: by_name.stage_of(name) or 0 for name, _ in model.named_buffers()}
    run = StageRun(bounds)
    own_blocks = _keep_blocks(container, run, {*own_stages})
    _drop_parameters(model, stages, {*own_stages}, device)
    return StagedModel(
        run,
        {**{names[key]: min(of) for key, of in stages.items()}, **buffers},
        shared,
        own_blocks,
    )


def _keep_blocks(
    blocks: Iterable[nn.Module], run: StageRun, own_stages: set[int]
) -> list[nn.Module]:
    """Have blocks compute in their stages alone; empty the others, and return this rank's."""
    own_blocks = []
    for number, block in enumerate(blocks):
        if bisect.bisect_right(run.bounds, number) - 1 in own_stages:
            own_blocks.append(block)
        else:
            for kept in (block._parameters, block._buffers, block._modules):
                kept.clear()
        block.__class__ = type(f"Pipelined{type(block).__name__}", (_Block, type(block)), {})
        block._pipeline_run, block._pipeline_number = run, number  # type: ignore[assignment]
    return own_blocks


@dataclasses.dataclass(frozen=True)
class _StagesByName:
    """Tells the stage of each name of a model."""

    plan: list[str]
    path: str
    keys: list[str]
    """The blocks' keys in what holds them."""
    bounds: list[int]

    def stage_of(self, name: str) -> int | None:
        """Return the stage of a parameter or buffer; None if the plan does not name it."""
        is_behind = False
        for entry in self.plan:
            if entry == f"{self.path}.*":
                is_behind = True
                if name.startswith(f"{self.path}."):
                    number = self.keys.index(name[len(self.path) + 1 :].partition(".")[0])
                    return bisect.bisect_right(self.bounds, number) - 1
            elif name == entry or name.startswith(f"{entry}."):
                return len(self.bounds) - 2 if is_behind else 0
        return None


def _stages_of_parameters(model: nn.Module, by_name: _StagesByName) -> dict[int, set[int]]:
    """Return the stages that have each parameter, by its id: those of all its names."""
    found: dict[int, set[int]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        stage = by_name.stage_of(name)
        if stage is None:
            raise RequestError(f"--pp: the model's plan does not name {name}")
        found.setdefault(id(parameter), set()).add(stage)
    return found


def _refuse_ties_of_blocks(
    path: str, shared: Mapping[str, tuple[int, ...]], num_ranks: int
) -> None:
    """Check that each rank has a tied parameter by its first name, which emptied blocks have not.

    Args:
        path: the name of what holds the blocks.
        shared: first name -> the stages that have it.
        num_ranks: ranks that the stages are dealt out to.
    """
    for name, stages in shared.items():
        if name.startswith(f"{path}.") and len({stage % num_ranks for stage in stages}) > 1:
            raise RequestError(
                f"--pp: the model's blocks share a tensor over stages, {name}, which is tied; "
                "untie it, or leave --pp out"
            )


def _path_of_blocks(model: nn.Module, plan: Sequence[str]) -> str:
    """Return the name of what holds the blocks.

    Raises:
        RequestError: the plan names none, or several, or what the model has not.
    """
    for entry in plan:
        if _attribute(model, entry.removesuffix(".*")) is None:
            raise RequestError(f"--pp: the model has no {entry}, which its plan names")
    paths = [entry.removesuffix(".*") for entry in plan if entry.endswith(".*")]
    if len(paths) != 1 or not isinstance(
        _attribute(model, paths[0]), (nn.ModuleList, nn.Sequential)
    ):
        raise RequestError(
            "--pp: a plan names the blocks once, as 'layers.*' where layers is their ModuleList or "
            f"Sequential; this one is {', '.join(plan)}"
        )
    return paths[0]


def _too_few_blocks(model_name: str, num_blocks: int, num_stages: int, num_own: int) -> str:
    has = f"--model {model_name} has {num_blocks} blocks"
    if num_own > 1:
        return (
            f"--pp {num_stages // num_own} --pp_schedule interleaved cuts {num_stages} stages, and "
            f"{has}; use --pp_schedule 1f1b"
        )
    return f"--pp {num_stages}: {has}, and each stage needs one; use --pp {num_blocks} or less"


def _drop_parameters(
    model: nn.Module, stages: Mapping[int, set[int]], own_stages: set[int], device: torch.device
) -> None:
    """Replace each parameter that other stages have by one NaN, expanded."""
    for module in model.modules():
        for key, parameter in [*module._parameters.items()]:
            if parameter is not None and not stages[id(parameter)] & own_stages:
                del module._parameters[key]
                value = math.nan if parameter.is_floating_point() else 0
                one = torch.full((), value, dtype=parameter.dtype, device=device)
                vars(module)[key] = one.expand(parameter.shape)
