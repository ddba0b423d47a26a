"""Runs a captured graph of ATen operations on jax arrays, inside jit or outside of it."""

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

# What says where a tensor lies and not what is in it.
_OF_PLACE = {
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
    """A line for each operation of a graph that has no row: its name and its first place."""
    found: dict[str, str] = {}
    for node in _calls(graph_module):
        if node.target is not operator.getitem and table.row(name(node)) is None:
            found.setdefault(name(node), f"{name(node)} ({place(node)})")
    return [*found.values()]


def refuse_missing(graph_module: fx.GraphModule) -> None:
    """
    Raises:
        RequestError: the graph has operations that no row computes; one line names them, their
            places in the model, and how rows are added.
    """
    lacking = missing(graph_module)
    if lacking:
        raise RequestError(
            f"engine jax has no lowering of {'; '.join(lacking)}. Add one: a function on jax "
            "arrays decorated by accbench.engines.jax.lowering.lowering('NAME'), in a module that "
            f"an entry point of the group {table.GROUP} names; or use another engine"
        )


def run_graph(
    graph_module: fx.GraphModule,
    args: Sequence[Any],
    key: Any = None,
    rules: Rules | None = None,
) -> list[Any]:
    """The outputs of a graph, in its order; None where the graph has None.

    Args:
        graph_module: a flat graph of functional operations, as aot_export_module gives it.
        args: a jax array for each placeholder, in the logical order of axes.
        key: a jax random key, for graphs that draw.
        rules: how it is lowered; None for the defaults.

    Raises:
        RequestError: an operation isn't in the table, or a dtype isn't in JAX.
        ValueError: the numbers of arguments and placeholders differ.
        TypeError: a row's result isn't of the shape and dtype that torch has noted for it.
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
            values[node] = _called(node, values, context)
        elif node.op == "output":
            outputs: Any = fx.node.map_arg(node.args[0], values.__getitem__)
            return [layout.plain(output) for output in outputs]
        for used in last_uses.get(node, ()):
            del values[used]  # outside of jit, or it would live to the end
    raise ValueError("the graph has no output")


def name(node: fx.Node) -> str:
    """`aten.relu.default`; of what is no operation of torch's, the name of what it is."""
    return str(node.target).removeprefix("torch.ops.")


def place(node: fx.Node) -> str:
    """Where in the model's own code a node comes from, as far as torch has noted it."""
    return (
        source_location.find_model_line(_frames(node))
        or _module_path(node)
        or "torch has noted no place"
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
    """Node -> the values that nobody needs after it; the node itself, if nobody needs it at all."""
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


def _called(node: fx.Node, values: dict[fx.Node, Any], context: Context) -> Any:
    arguments: Any = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    args, kwargs = arguments
    if node.target is operator.getitem:
        return args[0][args[1]]
    row = table.row(name(node))
    assert row is not None, "refused before"
    _refuse_float64(node, context.rules)
    args = [_argument(a) for a in args]
    kwargs = {k: _argument(v) for k, v in kwargs.items() if k not in _OF_PLACE}
    context.node = node
    with jax.named_scope(name(node)):
        result = layout.called(name(node), row, context, args, kwargs)
    return _checked(node, result)


def _argument(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return dtypes.jax_dtype(value)
    return [*value] if isinstance(value, (list, tuple)) else value


def _noted(node: fx.Node) -> list[Any]:
    value = node.meta.get("val")
    return [*value] if isinstance(value, (list, tuple)) else [value]


def _refuse_float64(node: fx.Node, rules: Rules) -> None:
    if rules.float64_as_float32 or dtypes.jax_dtype(torch.float64) == "float64":
        return
    for value in _noted(node):
        if isinstance(value, torch.Tensor) and value.dtype == torch.float64 and value.ndim:
            raise RequestError(
                f"{name(node)} ({place(node)}) gives float64, which JAX hasn't: use float32 "
                "there, set JAX_ENABLE_X64=1, or allow float32 for it"
            )


def _checked(node: fx.Node, result: Any) -> Any:
    """A row's result. One wrong about a shape or dtype would train something else, silently.

    What a normalization saves for its backward may come in float32; it is rounded to what torch
    saves, which in a model that is all 16-bit is 16-bit.
    """
    if not isinstance(result, (list, tuple)):
        return _as_noted(node, _noted(node)[0], result, False)
    noted = _noted(node)
    noted += [None] * (len(result) - len(noted))
    return [
        _as_noted(node, value, array, i > 0)
        for i, (value, array) in enumerate(zip(noted, result, strict=False))
    ]


def _as_noted(node: fx.Node, noted: Any, array: Any, saved: bool) -> Any:
    if not isinstance(noted, torch.Tensor) or array is None:
        return array
    dtype = dtypes.jax_dtype(noted.dtype)
    if saved and array.dtype != dtype and array.dtype == dtypes.opmath(dtype):
        array = array.astype(dtype)
    if tuple(noted.shape) != tuple(array.shape) or array.dtype != dtype:
        raise TypeError(
            f"{name(node)} gave {array.dtype}{[*array.shape]} where torch has "
            f"{dtype}{[*noted.shape]} ({place(node)})"
        )
    return array
