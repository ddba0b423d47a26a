"""Sequence parallelism: beside `--tp`, what lies between cut layers has a part of each sequence.

Each rank of `--tp` computes norms, dropout and residuals of its positions alone, so that it keeps
the activations of these (Korthikanti et al., Reducing Activation Recomputation in Large Transformer
Models, 2022). A sum over ranks becomes a reduce-scatter along the sequence, and what cut layers
take is gathered along it.

A plan maps names of modules, with `*` for any part of a name, to what becomes of the sequence,
axis 1 of (N, T, C), there:

- `scatter_input`: of the first input each rank takes its part; the module computes with that.
- `sequence_parallel`: computes with this rank's part: norms, and dropout.
- `gather_input`: all ranks' parts of the first input are gathered, in autocast's type, for the
  layers in it that `--tp` cuts by outputs.
- `gather_output`: computes with this rank's part, and all parts of its output are gathered.
"""

import fnmatch
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from accbench.distributed.collectives import (
    RankGroup,
    all_gather_along,
    autocast_dtype,
    gather_from_group,
    part_of_rank,
    scatter_along,
)
from accbench.engines.common import tensor_parallel
from accbench.engines.common.tensor_parallel import (
    GatheredColumnParallel,
    HeadParallelAttention,
    OutputParallel,
    ParallelModule,
    Plan,
    RowParallel,
    SummedGradients,
)
from accbench.errors import RequestError

PLAN_ATTRIBUTE = "sequence_parallel_plan"
"""The attribute of a network, or of a module in it, that holds its plan."""
_AXIS = 1
_WITH_PARTS = ("scatter_input", "sequence_parallel", "gather_output")
_WORDS = (*_WITH_PARTS, "gather_input")


class _PartialDropout(ParallelModule):
    """Dropout of this rank's part of each sequence, by its part of one mask for all ranks.

    All ranks draw the whole mask, as they do without sequence parallelism, from the same seed.
    """

    p: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or self.p == 0:
            return x
        shape = [*x.shape]
        shape[_AXIS] *= self.tensor_group.size
        ones = x.new_ones(shape)
        dropped = functional.dropout(ones, self.p, True)
        if dropped is ones:  # a comparison has replaced dropout by what drops nothing
            return x
        is_kept = part_of_rank(dropped != 0, self.group_rank, self.tensor_group, _AXIS)
        return torch.where(is_kept, x * (1 / (1 - self.p) if self.p < 1 else 0), 0)


def parallelize_by_own_plan(
    model: nn.Module, group: RankGroup, model_name: str, cut: Mapping[str, Any]
) -> frozenset[str]:
    """Share the sequence by the plan that a model brings; see `parallelize`.

    Raises:
        RequestError: it has no plan, or one that does not fit.
    """
    plan = tensor_parallel.find_plan(model, (PLAN_ATTRIBUTE,))
    if not plan:
        raise RequestError(
            f"--model {model_name} has no plan for --sequence_parallel; leave it out, or give the "
            f"network a {PLAN_ATTRIBUTE} (docs/parallel.md)"
        )
    return parallelize(model, plan, group, cut)


def parallelize(
    model: nn.Module, plan: Plan, group: RankGroup, cut: Mapping[str, Any]
) -> frozenset[str]:
    """Have the ranks that share a model's layers share the sequence between these, in place.

    Args:
        model: whose layers `tensor_parallel.parallelize` has cut.
        plan: see above.
        group: the ranks.
        cut: by name, the parameters that are cut.

    Returns:
        The parameters that each rank uses for its part of the sequence alone, so that their
        gradients are to be summed over the ranks.

    Raises:
        RequestError: the plan does not fit the model.
    """
    words = _words(model, plan)
    gathering = [path for path, word in words.items() if word == "gather_input"]
    for path, word in words.items():
        _share(model.get_submodule(path), word, group)
    for path, module in model.named_modules():
        if isinstance(module, RowParallel):
            module.sequence_axis = _AXIS
        elif isinstance(module, OutputParallel):
            _take_gathered(path, module, gathering)
    with_parts = {path for path, word in words.items() if word in _WITH_PARTS}
    names = frozenset(_partial_parameters(model, with_parts, cut))
    _refuse_forgotten(model, gathering, {*names, *cut, *_summed_parameters(model, with_parts)})
    return names


def _words(model: nn.Module, plan: Plan) -> dict[str, str]:
    """Return the plan's word for each module that it names, by the module's name."""
    words: dict[str, str] = {}
    unused = set(plan)
    for path, _ in model.named_modules():
        pattern = next((p for p in plan if fnmatch.fnmatchcase(path, p)), None)
        if pattern is not None:
            unused.discard(pattern)
            words[path] = plan[pattern]
    if unused:
        raise RequestError(
            f"--sequence_parallel: the model has no module {sorted(unused)[0]}, which its plan "
            "names"
        )
    for path, word in words.items():
        if word not in _WORDS:
            raise RequestError(
                f"--sequence_parallel: the plan says {word!r} of {path}; there are: "
                f"{', '.join(_WORDS)}"
            )
    for word in ("scatter_input", "gather_output"):
        if [*words.values()].count(word) != 1:
            raise RequestError(
                f"--sequence_parallel: the plan says {word} of {[*words.values()].count(word)} "
                "modules, not of one"
            )
    return words


def _share(module: nn.Module, word: str, group: RankGroup) -> None:
    """Give a module the forward pass that a word of the plan asks for."""
    if isinstance(module, nn.Dropout) and word in _WITH_PARTS:
        tensor_parallel.become_parallel(module, _PartialDropout, group)
        tensor_parallel.keep_rank(module, group)
    if word == "sequence_parallel":
        return
    tensor_parallel.keep_rank(module, group)
    change = {
        "scatter_input": _scatter_input, "gather_input": _gather_input,
        "gather_output": _gather_output,
    }[word]  # fmt: skip
    # In the module, whose class stays, for that is what tells blocks, and modules to checkpoint.
    module.forward = partial(change, module, module.forward)


_Forward = Callable[..., Any]


def _scatter_input(module: Any, forward: _Forward, *args: Any, **kwargs: Any) -> Any:
    group: RankGroup = module.tensor_group

    def part(x: torch.Tensor) -> torch.Tensor:
        if x.shape[_AXIS] % group.size:
            raise RequestError(
                f"--sequence_parallel: sequences of {x.shape[_AXIS]} are no multiple of --tp "
                f"{group.size}; leave --sequence_parallel out"
            )
        return scatter_along(x, module.group_rank, group, _AXIS)

    args, kwargs = _with_first(part, args, kwargs)
    return forward(*args, **kwargs)


def _gather_input(module: Any, forward: _Forward, *args: Any, **kwargs: Any) -> Any:
    group: RankGroup = module.tensor_group

    def whole(x: torch.Tensor) -> torch.Tensor:
        # Cast before it is sent; else each layer would cast, and keep, the whole sequence.
        return all_gather_along(x.to(autocast_dtype(x) or x.dtype), group, _AXIS)

    args, kwargs = _with_first(whole, args, kwargs)
    return forward(*args, **kwargs)


def _gather_output(module: Any, forward: _Forward, *args: Any, **kwargs: Any) -> Any:
    part = forward(*args, **kwargs)
    # Contiguous, as models may view it.
    return gather_from_group(part, module.group_rank, module.tensor_group, _AXIS).contiguous()


def _with_first(
    change: Callable[[torch.Tensor], torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments whose first one is changed, wherever it stands among them."""
    if not args:
        name = next(iter(kwargs))
        return args, {**kwargs, name: change(kwargs[name])}
    first = args[0]
    changed = change(first)
    return tuple([changed if value is first else value for value in args]), kwargs


def _take_gathered(path: str, module: OutputParallel, gathering: list[str]) -> None:
    """Leave the sum of a layer's gradients to what gathers its inputs.

    Raises:
        RequestError: nothing gathers them.
    """
    if isinstance(module, HeadParallelAttention) and not module.batch_first:
        raise RequestError(
            f"--sequence_parallel: {path} takes the batch second; build it with batch_first=True"
        )
    if any(path == outer or path.startswith(f"{outer}.") for outer in gathering):
        module.sums_gradients = False
    elif not isinstance(module, GatheredColumnParallel):
        raise RequestError(
            f"--sequence_parallel: --tp cuts {path} by outputs, and it is in no module of which "
            "the plan says gather_input"
        )


def _partial_parameters(
    model: nn.Module, with_parts: set[str], cut: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the names of parameters that are used for a part of the sequence.

    Raises:
        RequestError: one of them is used for all of it too.
    """
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    parts: dict[int, str] = {}
    wholes: set[int] = set()
    for path, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is None or name_of[id(parameter)] in cut:
                continue
            is_bias = isinstance(module, RowParallel) and key == "bias"
            if path in with_parts or is_bias:
                parts[id(parameter)] = name_of[id(parameter)]
            else:
                wholes.add(id(parameter))
    for key_of_part, name in parts.items():
        if key_of_part in wholes:
            raise RequestError(
                f"--sequence_parallel: {name} is tied to what computes with whole sequences"
            )
        yield name


def _summed_parameters(model: nn.Module, with_parts: set[str]) -> Iterator[str]:
    """Yield the names of parameters whose gradients the plan of `--tp` sums.

    Raises:
        RequestError: they would be summed once more.
    """
    for path, module in model.named_modules():
        if isinstance(module, SummedGradients):
            if path in with_parts:
                raise RequestError(
                    f"--sequence_parallel sums the gradients of {path}, and so does the plan for "
                    "--tp; leave it out of one of the two"
                )
            yield from (f"{path}.{key}" for key in module._parameters)


def _refuse_forgotten(model: nn.Module, gathering: list[str], known: set[str]) -> None:
    """Check that blocks have no parameter whose gradient would be that of a part alone."""
    blocks = {_block_of(model, path) for path in gathering}
    for name, _ in model.named_parameters():
        if name not in known and any(name.startswith(f"{block}.") for block in blocks):
            raise RequestError(
                f"--sequence_parallel: neither plan of the model says anything of {name}, which is "
                "in a block"
            )


def _block_of(model: nn.Module, path: str) -> str:
    """Return the innermost module around one that stands in a list, or that one itself."""
    block = path
    while "." in block:
        parent = block.rpartition(".")[0]
        if isinstance(model.get_submodule(parent), (nn.ModuleList, nn.Sequential)):
            return block
        block = parent
    return path
