"""One device a worker, and what goes on between them: all data parallel.

Each worker has all of the state, or (`--jax.shard`) of large arrays a part, which is ZeRO's and
FSDP's way: a step gathers the parameters, and each worker gets the mean of its part of a gradient.
"""

import atexit
import contextlib
import logging
import math
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from accbench.distributed import process_group
from accbench.distributed.process_group import Topology

_AXIS = "workers"
# Smaller arrays are whole on every worker: a collective costs more than they do.
_LEAST_PARTED = 1024
# Arrays of so many elements are reduced by themselves: to put them behind others and take them
# back is to copy them twice (docs/measured.md).
_LEAST_APART = 2**18

Axis = int | None
"""Along which an array is parted between the workers; None where each has all of it."""


def meet(topology: Topology, device: str, timeout_s: float) -> None:
    """Have JAX's processes find each other, by the process group that is there.

    Called before JAX is used, and once only.
    """
    if topology.world_size == 1 or jax.distributed.is_initialized():
        return
    own = process_group.local_address()
    if device == "cpu":
        _reduce_at(own)
    with _address(topology, own) as address:
        jax.distributed.initialize(
            address, topology.world_size, topology.rank,
            local_device_ids=None if device == "cpu" else [topology.local_rank],
            initialization_timeout=int(timeout_s), coordinator_bind_address=address,
        )  # fmt: skip
    _let_errors_end_alone()


def _let_errors_end_alone() -> None:
    """Do not have a worker that ends by an error wait for the others, and abort them.

    `leave` is for those that end well. JAX would leave at the end of every process.
    """
    from jax._src import api

    clean_up = getattr(api, "clean_up", None)
    if clean_up is not None:
        atexit.unregister(clean_up)


def leave() -> None:
    """Part from the others, when all are done; waits for them."""
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()


@contextlib.contextmanager
def _address(topology: Topology, own: str) -> Iterator[str]:
    """Where rank 0 will listen, on every rank: a port that is free there."""
    with contextlib.ExitStack() as stack:
        address = None
        if topology.rank == 0:
            family = socket.AF_INET6 if ":" in own else socket.AF_INET
            listener = stack.enter_context(socket.socket(family))
            listener.bind((own, 0))
            host = f"[{own}]" if ":" in own else own
            address = f"{host}:{listener.getsockname()[1]}"
        address = process_group.broadcast_value(address)
        stack.close()  # just before JAX listens there
        assert isinstance(address, str)
        yield address


def _reduce_at(own: str) -> None:
    """Have JAX's Gloo meet the others at this address; by itself it takes the machine's name's.

    That is the loopback on many machines, at which others do not reach it.
    """
    from jax._src import distributed, xla_bridge
    from jaxlib import _jax

    def client() -> Any:
        gloo = _jax.make_gloo_tcp_collectives(
            distributed_client=distributed.global_state.client, hostname=own
        )
        return xla_bridge.make_cpu_client(gloo)

    xla_bridge.register_backend_factory("cpu", client, priority=0, fail_quietly=False)


@contextlib.contextmanager
def _without_tracebacks() -> Iterator[None]:
    """JAX looks at the plug-ins of all platforms, wanted or not, and shows how some don't load."""
    logger = logging.getLogger("jax._src.xla_bridge")
    logger.addFilter(_has_no_traceback)
    try:
        yield
    finally:
        logger.removeFilter(_has_no_traceback)


def _has_no_traceback(record: logging.LogRecord) -> bool:
    return record.exc_info is None


def own_device() -> jax.Device:
    """This process's; the first to ask starts JAX."""
    with _without_tracebacks():
        return jax.local_devices()[0]


class Workers:
    """Arrays that all workers share, arrays of each one's own, and functions over both.

    Args:
        shards: part large arrays of `state` between the workers.
        by_gloo: XLA on a CPU reduces, which has gloo take array after array and waits for each: so
            small ones are put behind each other.
    """

    def __init__(self, topology: Topology, shards: bool = False, by_gloo: bool = False) -> None:
        self.device = own_device()
        self._rank, self._shards, self._by_gloo = topology.rank, shards, by_gloo
        self._mesh = None
        if topology.world_size > 1:
            self._mesh = Mesh(np.array(jax.devices()), (_AXIS,))

    def axis_of(self, shape: Sequence[int]) -> Axis:
        """How an array of `state` of this shape is parted."""
        if not self._shards or self._mesh is None or math.prod(shape) < _LEAST_PARTED:
            return None
        num = self._mesh.size
        return next((axis for axis, length in enumerate(shape) if length % num == 0), None)

    def part(self, tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
        """Of a tensor that all workers have, what this one keeps."""
        if axis is None:
            return tensor
        assert self._mesh is not None
        return tensor.chunk(self._mesh.size, axis)[self._rank]

    def shared(self, tree: Any, axis: Axis = None) -> Any:
        """Arrays on this device, the same on all workers or parts of them, as functions take."""
        if axis is None:
            return self._placed(tree, PartitionSpec(), lambda array: array)
        return self._placed(tree, _spec(axis), lambda array: array)

    def own(self, tree: Any) -> Any:
        """Arrays on this device, each worker's own, as what functions take."""
        return self._placed(tree, PartitionSpec(_AXIS), lambda array: array[None])

    def _placed(self, tree: Any, spec: PartitionSpec, form: Callable[[Any], Any]) -> Any:
        mesh = self._mesh
        if mesh is None:
            return tree

        def placed(array: Any) -> Any:
            part = jax.device_put(form(array), self.device)
            shape = _whole_shape(part.shape, spec, mesh.size)
            sharding = NamedSharding(mesh, spec)
            return jax.make_array_from_single_device_arrays(shape, sharding, [part])

        return jax.tree.map(placed, tree)

    def here(self, array: jax.Array, is_own: bool = False) -> jax.Array:
        """This worker's part of what a function gave."""
        if self._mesh is None:
            return array
        part = array.addressable_data(0)
        return part[0] if is_own else part

    def _mean(self, arrays: list[Any]) -> list[Any]:
        """Inside of functions: the mean over the workers."""
        if self._mesh is None or not arrays:
            return arrays
        if not self._by_gloo:
            return list(lax.pmean(arrays, _AXIS))
        large = {place: a for place, a in enumerate(arrays) if a.size >= _LEAST_APART}
        small = {place: a for place, a in enumerate(arrays) if place not in large}
        flat, restored = ravel_pytree(small)
        flat, large = lax.pmean((flat, large), _AXIS)
        means = large | restored(flat)
        return [means[place] for place in range(len(arrays))]

    def whole(self, array: Any, axis: Axis) -> Any:
        """Inside of functions: all of an array of `state`."""
        return array if axis is None else lax.all_gather(array, _AXIS, axis=axis, tiled=True)

    def mean_parts(self, arrays: list[Any], axes: Sequence[Axis]) -> list[Any]:
        """Inside of functions: of the mean over the workers, the parts that this one keeps."""
        if self._mesh is None or not any(axis is not None for axis in axes):
            return self._mean(arrays)
        num = self._mesh.size
        means = iter(self._mean([a for a, axis in zip(arrays, axes, strict=True) if axis is None]))
        return [
            next(means) if axis is None
            else lax.psum_scatter(array, _AXIS, scatter_dimension=axis, tiled=True) / num
            for array, axis in zip(arrays, axes, strict=True)
        ]  # fmt: skip

    def sums(self, of_parts: Any, axes: Sequence[Axis]) -> Any:
        """Inside of functions: (n,) sums over whole arrays, from sums over this worker's parts."""
        is_parted = np.array([axis is not None for axis in axes])
        if not is_parted.any():
            return of_parts
        return jnp.where(is_parted, lax.psum(of_parts, _AXIS), of_parts)

    def any_of(self, of_parts: Any, axes: Sequence[Axis]) -> Any:
        """Inside of functions: whether it is so for any worker's parts; bool, ()."""
        if all(axis is None for axis in axes):
            return of_parts
        return lax.pmax(of_parts.astype(jnp.int32), _AXIS) > 0

    def function(self, step: Callable[..., Any], state: Any = None) -> Any:
        """`step(shared, own, shared, own) -> (shared, own, own)`, jitted; reuses the first two.

        Args:
            state: the first argument, where some of it is parted; the result is parted alike.
        """
        if self._mesh is None:
            return jax.jit(step, donate_argnums=(0, 1))
        common, own = PartitionSpec(), PartitionSpec(_AXIS)
        parted = common if state is None else jax.tree.map(lambda a: a.sharding.spec, state)

        def of_worker(state: Any, own_state: Any, given: Any, own_given: Any) -> Any:
            own_state, own_given = jax.tree.map(lambda a: a[0], (own_state, own_given))
            state, *of_own = step(state, own_state, given, own_given)
            return state, *jax.tree.map(lambda a: a[None], of_own)

        mapped = jax.shard_map(
            of_worker, mesh=self._mesh, in_specs=(parted, own, common, own),
            out_specs=(parted, own, own), check_vma=False,
        )  # fmt: skip
        return jax.jit(mapped, donate_argnums=(0, 1))


def _spec(axis: int) -> PartitionSpec:
    return PartitionSpec(*[None] * axis, _AXIS)


def _whole_shape(part: Sequence[int], spec: PartitionSpec, num: int) -> tuple[int, ...]:
    """Of an array, from the shape of a part of it."""
    parted = dict(enumerate(spec))
    return tuple(n * num if parted.get(axis) == _AXIS else n for axis, n in enumerate(part))


class Absent(Workers):
    """Workers that are not here, seen from none of them: arrays are shapes and types alone."""

    def __init__(self, topology: Topology, shards: bool = False) -> None:
        found = jax.devices()[: topology.world_size]
        self.device, self._rank, self._shards, self._by_gloo = found[0], 0, shards, False
        self._mesh = Mesh(np.array(found), (_AXIS,)) if topology.world_size > 1 else None

    def _placed(self, tree: Any, spec: PartitionSpec, form: Callable[[Any], Any]) -> Any:
        mesh = self._mesh
        if mesh is None:
            return tree

        def placed(array: Any) -> Any:
            part = jax.eval_shape(form, array)
            shape = _whole_shape(part.shape, spec, mesh.size)
            return jax.ShapeDtypeStruct(shape, array.dtype, sharding=NamedSharding(mesh, spec))

        return jax.tree.map(placed, tree)
