"""Runs a captured graph of ATen operations on jax arrays, inside jit or outside of it."""

import contextlib
import operator
import re
import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from accbench.engines.common import source_location
from accbench.engines.jax.lowering import dtypes, layout, table
from accbench.engines.jax.lowering.context import Context, Rules
from accbench.errors import RequestError

# Arguments that tell where a tensor lies, not what it holds.
_PLACEMENT_ARGUMENTS = {
    "device",
    "layout",
    "pin_memory",
    "memory_format",
    "non_blocking",
    "generator",
    "requires_grad",
}
_FRAME = re.compile(r'File "(.*)", line (\d+), in (.*)\n    (.*)')


def missing(graph_module: fx.GraphModule) -> list[str]:
    """Return a line for each operation without a row: its name and its first place."""
    lines: dict[str, str] = {}
    for node in _calls(graph_module):
        if node.target is not operator.getitem and table.row(op_name(node)) is None:
            lines.setdefault(op_name(node), f"{op_name(node)} ({source_of(node)})")
    return [*lines.values()]


def refuse_missing(graph_module: fx.GraphModule) -> None:
    """Raise RequestError if the graph has operations that no row computes.

    Raises:
        RequestError: one line names them, their places in the model, and how rows are added.
    """
    operations = missing(graph_module)
    if operations:
        raise RequestError(
            f"engine jax has no lowering of {'; '.join(operations)}. Add one: a function on jax "
            "arrays decorated by accbench.engines.jax.lowering.lowering('NAME'), in a module that "
            f"an entry point of the group {table.GROUP} names; or use another engine"
        )


def run_graph(
    graph_module: fx.GraphModule,
    args: Sequence[Any],
    key: Any = None,
    rules: Rules | None = None,
) -> list[Any]:
    """Run a graph, and return its outputs in its order; None where the graph has None.

    Args:
        graph_module: a flat graph of functional operations, as aot_export_module gives it.
        args: a jax array for each placeholder, in the logical order of axes.
        key: a jax random key, for graphs that draw.
        rules: how it is lowered; None for the defaults.

    Raises:
        RequestError: an operation is not in the table, or a dtype not in JAX.
        ValueError: the numbers of arguments and placeholders differ.
        TypeError: a row's result does not have the shape and dtype that torch recorded for it.
    """
    refuse_missing(graph_module)
    context = Context(key, rules or Rules())
    values: dict[fx.Node, Any] = {}
    placeholders = [n for n in graph_module.graph.nodes if n.op == "placeholder"]
    if len(placeholders) != len(args):
        raise ValueError(f"{len(placeholders)} placeholders, {len(args)} arguments")
    values.update(zip(placeholders, args, strict=True))
    last_uses = _last_uses(graph_module)
    for node in graph_module.graph.nodes:
        if node.op == "get_attr":
            values[node] = _constant(graph_module, node)
        elif node.op == "call_function":
            values[node] = _call(node, values, context)
        elif node.op == "output":
            outputs: Any = fx.node.map_arg(node.args[0], values.__getitem__)
            return [layout.to_channels_first(output) for output in outputs]
        for used in last_uses.get(node, ()):
            del values[used]  # frees memory outside of jit
    raise ValueError("the graph has no output")


def op_name(node: fx.Node) -> str:
    """Return `aten.relu.default` and the like; for what is no operation of torch's, its name."""
    return str(node.target).removeprefix("torch.ops.")


def source_of(node: fx.Node) -> str:
    """Return where in the model's own code a node comes from, as far as torch recorded it."""
    return (
        source_location.find_model_line(_frames(node))
        or _module_path(node)
        or "torch recorded no location"
    )


def _frames(node: fx.Node) -> Iterator[traceback.FrameSummary]:
    for file, line, function, code in _FRAME.findall(node.meta.get("stack_trace") or ""):
        yield traceback.FrameSummary(file, int(line), function, line=code)


def _module_path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    paths = [path for path, _ in stack.values() if path]
    return f"module {paths[-1]}" if paths else ""


def _calls(graph_module: fx.GraphModule) -> Iterable[fx.Node]:
    return (n for n in graph_module.graph.nodes if n.op in ("call_function", "call_module"))


def _last_uses(graph_module: fx.GraphModule) -> dict[fx.Node, list[fx.Node]]:
    """Return node -> the values that no later node needs.

    A node's own value is among them if no node needs it at all.
    """
    last: dict[fx.Node, fx.Node] = {}
    for node in graph_module.graph.nodes:
        last[node] = node
        last.update(dict.fromkeys(node.all_input_nodes, node))
    uses: dict[fx.Node, list[fx.Node]] = {}
    for value, user in last.items():
        uses.setdefault(user, []).append(value)
    return uses


def _constant(graph_module: fx.GraphModule, node: fx.Node) -> Any:
    value = operator.attrgetter(str(node.target))(graph_module)
    if isinstance(value, torch.Tensor):
        with unset_fake_temporarily():  # AOTAutograd compiles among fake tensors
            return dtypes.to_jax(value, f"the constant {node.target}")
    return value


def _call(node: fx.Node, values: dict[fx.Node, Any], context: Context) -> Any:
    arguments: Any = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    args, kwargs = arguments
    if node.target is operator.getitem:
        return args[0][args[1]]
    row = table.row(op_name(node))
    assert row is not None, "refused before"
    _refuse_float64(node, context.rules)
    args = [_convert_argument(a) for a in args]
    kwargs = {k: _convert_argument(v) for k, v in kwargs.items() if k not in _PLACEMENT_ARGUMENTS}
    context.node = node
    with jax.named_scope(op_name(node)), _product_precision(node, context.rules):
        result = layout.call_row(op_name(node), row, context, args, kwargs)
    return _check_results(node, result)


def _product_precision(node: fx.Node, rules: Rules) -> contextlib.AbstractContextManager[Any]:
    """Choose the precision of products, for operations that see no 16 bits.

    XLA widens products of 16 bits, and moves more bytes, if they are asked to be precise as well.
    """
    tensors = [value for used in node.all_input_nodes for value in _fake_values(used)]
    dtypes_in = {value.dtype for value in tensors if isinstance(value, torch.Tensor)}
    if not rules.exact_float32 or dtypes_in & {torch.bfloat16, torch.float16}:
        return contextlib.nullcontext()
    precision: contextlib.AbstractContextManager[Any] = jax.default_matmul_precision("highest")
    return precision


def _convert_argument(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return dtypes.jax_dtype(value)
    return [*value] if isinstance(value, (list, tuple)) else value


def _fake_values(node: fx.Node) -> list[Any]:
    value = node.meta.get("val")
    return [*value] if isinstance(value, (list, tuple)) else [value]


def _refuse_float64(node: fx.Node, rules: Rules) -> None:
    if rules.float64_as_float32 or dtypes.jax_dtype(torch.float64) == "float64":
        return
    for value in _fake_values(node):
        if isinstance(value, torch.Tensor) and value.dtype == torch.float64 and value.ndim:
            raise RequestError(
                f"{op_name(node)} ({source_of(node)}) gives float64, which JAX hasn't: use float32 "
                "there, set JAX_ENABLE_X64=1, or allow float32 for it"
            )


def _check_results(node: fx.Node, result: Any) -> Any:
    """Check a row's results: a wrong shape or dtype would silently train something else.

    What a normalization saves for its backward may come in float32; it is rounded to what torch
    saves, which in a model that is all 16-bit is 16-bit.
    """
    if not isinstance(result, (list, tuple)):
        return _check_result(node, _fake_values(node)[0], result, False)
    fake_values = _fake_values(node)
    fake_values += [None] * (len(result) - len(fake_values))
    return [
        _check_result(node, value, array, i > 0)
        for i, (value, array) in enumerate(zip(fake_values, result, strict=False))
    ]


def _check_result(node: fx.Node, fake: Any, array: Any, is_saved: bool) -> Any:
    if not isinstance(fake, torch.Tensor) or array is None:
        return array
    dtype = dtypes.jax_dtype(fake.dtype)
    if is_saved and array.dtype != dtype and array.dtype == dtypes.opmath(dtype):
        array = array.astype(dtype)
    if tuple(fake.shape) != tuple(array.shape) or array.dtype != dtype:
        raise TypeError(
            f"{op_name(node)} gave {array.dtype}{[*array.shape]} where torch has "
            f"{dtype}{[*fake.shape]} ({source_of(node)})"
        )
    return array
