"""Tensor parallelism: layers whose weights are cut over ranks, by a plan of names.

A plan maps names of modules, with `*` for any part of a name, to how each is cut. The words are
those of transformers' plans, whose own are taken where a model has no other:

- `colwise`: outputs are cut; each rank computes its own.
- `packed_colwise:N`: likewise for N layers in one weight, such as query, key and value.
- `rowwise`: inputs are cut; the ranks' products are summed.
- `colwise_gather_output`: outputs are cut, and gathered.
- `embedding_rowwise`: an embedding's rows are cut.
- `multihead_attention`: torch's, by its heads.
- `replicated_with_grad_allreduce`: nothing is cut, and gradients are summed: what computes with a
  rank's part, between a layer cut by outputs and one cut by inputs.
- `divide:ATTRIBUTES`: no weights; sizes, by commas, that the module keeps of its cut layers.

Weights are plain tensors, so all that works on those works on cut ones: ties, fused optimizers,
FSDP over the other ranks, compilers.
"""

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from accbench.distributed.collectives import (
    RankGroup,
    copy_to_group,
    gather_from_group,
    reduce_from_group,
    reduce_scatter_along,
)
from accbench.distributed.tensor_slices import TensorSlice
from accbench.engines.common import tied_parameters
from accbench.errors import RequestError
from accbench.recording.terminal import log

Plan = Mapping[str, str]
PLAN_ATTRIBUTE = "tensor_parallel_plan"
"""The attribute of a network, or of a module in it, that holds its plan."""
_TRANSFORMERS_ATTRIBUTE = "_tp_plan"


class ParallelModule(nn.Module):
    """A layer with this rank's part of its weights."""

    tensor_group: RankGroup
    group_rank: torch.Tensor
    """This rank in the group, int64 (): a buffer, so that all ranks compile one graph."""


class OutputParallel(ParallelModule):
    """A layer of which this rank computes some outputs, from all inputs."""

    sums_gradients = True
    """The layer sums its inputs' gradients over the ranks; where False, what gathers them does."""

    def _shared(self, x: torch.Tensor) -> torch.Tensor:
        return copy_to_group(x, self.tensor_group) if self.sums_gradients else x


class ColumnParallel(OutputParallel):
    """A product of which this rank computes some columns."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the outputs."""
        product: torch.Tensor = super().forward(self._shared(x))
        return product


class GatheredColumnParallel(ColumnParallel):
    """Likewise, but each rank gets all outputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return all ranks' outputs."""
        return gather_from_group(super().forward(x), self.group_rank, self.tensor_group)


class RowParallel(ParallelModule):
    """A layer of which this rank has some inputs."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    sequence_axis: int | None = None
    """Along which each rank keeps a part of the outputs; None: each has all of them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' products, plus the bias."""
        weight = self.weight.T if _is_transposed(self) else self.weight
        product = functional.linear(x, weight)
        if self.sequence_axis is None:
            summed = reduce_from_group(product, self.tensor_group)
        else:
            summed = reduce_scatter_along(product, self.tensor_group, self.sequence_axis)
        return summed if self.bias is None else summed + self.bias.to(summed.dtype)


class _VocabularyParallelEmbedding(ParallelModule):
    weight: torch.Tensor
    padding_idx: int | None

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        length = self.weight.shape[0]
        local = indices - self.group_rank * length
        is_here = (local >= 0) & (local < length)
        rows = functional.embedding(torch.where(is_here, local, 0), self.weight)
        if self.padding_idx is not None:  # whose row is looked up and does not train
            rows = torch.where((indices == self.padding_idx)[..., None], rows.detach(), rows)
        return reduce_from_group(rows * is_here[..., None], self.tensor_group)


class HeadParallelAttention(OutputParallel):
    """torch's MultiheadAttention of a sequence with itself, of this rank's heads."""

    head_dim: int
    batch_first: bool
    dropout: float

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        key_padding_mask: Any = None, need_weights: bool = True, attn_mask: Any = None,
        average_attn_weights: bool = True, is_causal: bool = False,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        """Return (the sequence's attention to itself, None)."""
        is_masked = key_padding_mask is not None or attn_mask is not None or is_causal
        if is_masked or need_weights or key is not query or value is not query:
            raise RequestError(
                "--tp cuts attention of a sequence with itself, without masks and with "
                "need_weights=False; leave --tp out"
            )
        sequence = query if self.batch_first else query.transpose(0, 1)
        packed = functional.linear(self._shared(sequence), self.in_proj_weight, self.in_proj_bias)  # type: ignore[arg-type]
        q, k, v = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in packed.chunk(3, -1)
        )
        attended = functional.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout if self.training else 0.0
        )
        out = self.out_proj(attended.transpose(1, 2).flatten(2))  # type: ignore[operator]
        return out if self.batch_first else out.transpose(0, 1), None


class SummedGradients(ParallelModule):
    """A layer with whole weights that computes with this rank's part, so gradients are summed."""


def _sum_gradients(path: str, module: nn.Module, group: RankGroup) -> None:
    """Have a module read its parameters in a form whose gradients are summed over the ranks."""
    if not module._parameters:
        raise RequestError(
            f"--tp: {path or 'the network itself'} has no parameters of its own, whose gradients "
            "are summed"
        )
    become_parallel(module, SummedGradients, group)
    for key in module._parameters:
        # A property rather than another value, as ranks' shards and compilers replace that.
        setattr(type(module), key, property(partial(_read_to_sum, key)))


def _read_to_sum(key: str, module: Any) -> torch.Tensor | None:
    parameter = module._parameters[key]
    if parameter is None or hasattr(parameter, "placements"):
        return parameter  # a shard, which FSDP reads to gather it
    return copy_to_group(parameter, module.tensor_group)


def find_plan(
    model: nn.Module, attributes: Sequence[str] = (PLAN_ATTRIBUTE, _TRANSFORMERS_ATTRIBUTE)
) -> Plan:
    """Return the plan of a network, or of the first module in it that has one; {} if none has."""
    for attribute in attributes:
        for name, module in model.named_modules():
            plan = getattr(module, attribute, None)
            if plan:
                prefix = f"{name}." if name else ""
                return {prefix + pattern: style for pattern, style in plan.items()}
    return {}


def parallelize_by_own_plan(
    model: nn.Module, group: RankGroup, model_name: str
) -> dict[str, TensorSlice]:
    """Cut a model's weights by the plan that it brings; see `parallelize`.

    Raises:
        RequestError: it has no plan, or one that does not fit.
    """
    plan = find_plan(model)
    if not plan:
        raise RequestError(
            f"--model {model_name} has no plan for --tp {group.size}; use --dp_shard, or give the "
            f"network a {PLAN_ATTRIBUTE} (docs/parallel.md)"
        )
    return parallelize(model, plan, group)


def parallelize(model: nn.Module, plan: Plan, group: RankGroup) -> dict[str, TensorSlice]:
    """Cut a model's weights in place, and have its layers compute with their parts.

    Args:
        model: with whole weights, the same on all ranks, or weights on the device meta.
        plan: see above.
        group: the ranks that each keep a part.

    Returns:
        Parameter's first name -> the part that this rank keeps; those of whole ones are missing.

    Raises:
        RequestError: the plan does not fit the model, or a weight cannot be cut so often.
    """
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    slices: dict[int, TensorSlice] = {}
    cut_modules: set[str] = set()
    unused = set(plan)
    for path, module in [*model.named_modules()]:
        pattern = next((p for p in plan if fnmatch.fnmatchcase(path, p)), None)
        if pattern is None:
            continue
        unused.discard(pattern)
        style, _, argument = plan[pattern].partition(":")
        if style == "divide":
            _divide(path, module, argument.split(","), group.size)
            continue
        if style == "replicated_with_grad_allreduce":
            _sum_gradients(path, module, group)
            continue
        weight: Any = getattr(module, "weight", None)
        if style in _SKIPPED_IF_UNEVEN and len(weight) % group.size:
            log.info(
                f"{path} has {len(weight)} rows, no multiple of --tp {group.size}: each worker "
                "keeps it whole"
            )
            continue
        num_fused = _num_fused(path, module, style, argument)
        for key, axis in _axes(path, module, style):
            parameter = getattr(module, key, None)
            if parameter is None:
                continue
            shape = tuple(parameter.shape)
            part = TensorSlice(shape, axis, group.rank, group.size, num_fused)
            _check(path, part, _head_size(model, path))
            if slices.setdefault(id(parameter), part) != part:
                raise RequestError(f"--tp: {path}.{key} is tied to what is cut in another way")
        cut_modules.add(path)
        for attribute in _CUT_SIZES.get(style, ()):
            if hasattr(module, attribute):
                setattr(module, attribute, getattr(module, attribute) // group.size)
        become_parallel(module, _LAYERS[style], group)
    if unused:
        raise RequestError(
            f"--tp: the model has no module {sorted(unused)[0]}, which its plan names"
        )
    _refuse_ties_to_whole_modules(model, slices, cut_modules)
    _replace_parameters(model, slices)
    return {name_of[key]: part for key, part in slices.items()}


_LAYERS: dict[str, type[ParallelModule]] = {
    "colwise": ColumnParallel, "packed_colwise": ColumnParallel, "rowwise": RowParallel,
    "colwise_gather_output": GatheredColumnParallel, "colwise_rep": GatheredColumnParallel,
    "embedding_rowwise": _VocabularyParallelEmbedding,
    "multihead_attention": HeadParallelAttention,
}  # fmt: skip
# Sizes that torch's Linear and Embedding and transformers' Conv1D keep, which reads some of them.
_CUT_SIZES = {
    "colwise": ("out_features", "nf"), "packed_colwise": ("out_features", "nf"),
    "rowwise": ("in_features", "nx"), "colwise_gather_output": ("out_features", "nf"),
    "colwise_rep": ("out_features", "nf"), "embedding_rowwise": ("num_embeddings",),
}  # fmt: skip
_RANK_BUFFER = "group_rank"
_KNOW_THEIR_RANK = (GatheredColumnParallel, _VocabularyParallelEmbedding)
# Vocabularies, whose size the data decides.
_SKIPPED_IF_UNEVEN = ("colwise_gather_output", "colwise_rep", "embedding_rowwise")


def _num_fused(path: str, module: nn.Module, style: str, argument: str) -> int:
    """Return how many layers a module's weight holds."""
    if style == "multihead_attention":
        if any(getattr(module, key) is not None for key in ("bias_k", "bias_v")) or (
            module.in_proj_weight is None or module.add_zero_attn
        ):
            raise RequestError(
                f"--tp: {path} has keys of another width or of its own, which are not cut"
            )
        return 3
    if argument and not (style == "packed_colwise" and argument.isdigit()):
        raise RequestError(f"--tp: {path} is to be cut {style}:{argument}; no such way is known")
    return int(argument or 1)


def _refuse_ties_to_whole_modules(
    model: nn.Module, slices: Mapping[int, TensorSlice], cut_modules: set[str]
) -> None:
    """Check that no module computes with a part of a weight as if it were the whole."""
    for path, module in model.named_modules():
        for key, parameter in module._parameters.items():
            is_cut = parameter is not None and id(parameter) in slices and parameter.dim() > 1
            if is_cut and path not in cut_modules:
                raise RequestError(
                    f"--tp: {path}.{key} is tied to a weight that the plan cuts, and {path} is not "
                    "in the plan"
                )


def _axes(path: str, module: nn.Module, style: str) -> Iterator[tuple[str, int]]:
    """Yield the module's parameters to cut, and the axis of each."""
    if style == "multihead_attention":
        yield from (("in_proj_weight", 0), ("in_proj_bias", 0))
    elif style == "embedding_rowwise":
        yield "weight", 0
    elif style == "rowwise":
        yield "weight", 0 if _is_transposed(module) else 1
    elif style in _LAYERS:
        yield from (("weight", 1 if _is_transposed(module) else 0), ("bias", 0))
    else:
        known = ", ".join((*_LAYERS, "replicated_with_grad_allreduce", "divide"))
        raise RequestError(f"--tp: {path} is to be cut {style!r}; there are: {known}")


def _is_transposed(module: nn.Module) -> bool:
    """Return whether the weight is (in, out): that of transformers' Conv1D."""
    return any(base.__name__ == "Conv1D" for base in type(module).__mro__)


def _head_size(model: nn.Module, path: str) -> int:
    """Return the size of an attention's heads, which a layer of it is cut between; 1 for others."""
    modules = (model.get_submodule(path), model.get_submodule(path.rpartition(".")[0]))
    keys = ("head_dim", "attention_head_size")
    sizes = (getattr(module, key, None) for module in modules for key in keys)
    return next((size for size in sizes if isinstance(size, int)), 1)


def _check(path: str, part: TensorSlice, head_size: int) -> None:
    length = part.shape[part.axis] // part.num_fused
    count = length // head_size if length % head_size == 0 else length
    if count % part.num_ranks == 0 and part.shape[part.axis] % part.num_fused == 0:
        return
    what = "heads" if head_size > 1 else "columns" if part.axis == 0 else "rows"
    _refuse(path, count, what, part.num_ranks)


def _refuse(path: str, count: int, what: str, num_ranks: int) -> None:
    fitting = [n for n in range(1, num_ranks) if count % n == 0]
    values = " or ".join(map(str, fitting[-3:]))
    raise RequestError(f"--tp {num_ranks}: {path} has {count} {what}; use --tp {values}")


def _divide(path: str, module: nn.Module, attributes: list[str], num_ranks: int) -> None:
    for attribute in attributes:
        size = getattr(module, attribute, None)
        if not isinstance(size, int):
            raise RequestError(f"--tp: {path} has no size {attribute}, which its plan names")
        if size % num_ranks:
            _refuse(path, size, attribute, num_ranks)
        setattr(module, attribute, size // num_ranks)


def rank_buffers(net: nn.Module) -> set[str]:
    """Return the names of buffers that layers keep of their rank, which no other mesh has."""
    return {
        f"{path}.{_RANK_BUFFER}" if path else _RANK_BUFFER
        for path, module in net.named_modules()
        if _RANK_BUFFER in module._buffers and isinstance(module.tensor_group, RankGroup)
    }


def become_parallel(module: nn.Module, layer: type[ParallelModule], group: RankGroup) -> None:
    """Give a module the parallel layer's forward pass before its own.

    Raises:
        RequestError: it is checkpointed, and would compute by the pass that it had before.
    """
    plain = type(module)
    if "forward" in vars(module):
        raise RequestError(
            f"--tp changes how {plain.__name__} computes; leave it out of --checkpoint_modules, "
            "or name the modules around it"
        )
    module.__class__ = type(f"{layer.__name__}{plain.__name__}", (layer, plain), {})
    module.tensor_group = group  # type: ignore[assignment]
    if layer is HeadParallelAttention:
        # Or torch's encoder layers would compute with its weights by themselves, to evaluate.
        module._qkv_same_embed_dim = False  # type: ignore[assignment]
    if layer in _KNOW_THEIR_RANK:
        keep_rank(module, group)


def keep_rank(module: nn.Module, group: RankGroup) -> None:
    """Have a module keep its group, and its rank there as a buffer."""
    module.tensor_group = group  # type: ignore[assignment]
    module.register_buffer(_RANK_BUFFER, torch.tensor(group.rank), persistent=False)


def _replace_parameters(model: nn.Module, slices: Mapping[int, TensorSlice]) -> None:
    parts: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for key, whole in module._parameters.items():
            if whole is None or id(whole) not in slices:
                continue
            if id(whole) not in parts:
                cut = slices[id(whole)].cut(whole.detach())
                part = nn.Parameter(cut.clone(memory_format=torch.contiguous_format))
                part.requires_grad_(whole.requires_grad)
                tied_parameters.copy_attributes_and_hooks(whole, part)
                parts[id(whole)] = part
            module._parameters[key] = parts[id(whole)]
