"""A mesh of one device a rank, and its collectives: data parallel training.

Each rank holds the whole state, or (`--dp_shard`) a shard of each large array as in ZeRO and
FSDP: a step gathers the parameters, and each rank gets the mean of its shard of a gradient. With
`--tp` neighbouring ranks have parts of the model's layers, and share a batch.
"""

import atexit
import contextlib
import logging
import math
import os
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
from accbench.engines.jax.lowering.rows.collectives import TOKEN_AXES, TP_AXIS
from accbench.errors import RequestError

_AXIS = TOKEN_AXES
_ALL_AXES = (*_AXIS, TP_AXIS)
# Smaller arrays are replicated: a collective costs more than they do.
_MIN_SHARDED_SIZE = 1024
# Arrays of so many elements are reduced by themselves: a bucket copies them twice, in and out
# (docs/measured.md).
_MIN_UNBUCKETED_SIZE = 2**18

Axis = int | None
"""The axis along which an array is sharded over the ranks; None where it is replicated."""


def init_distributed(topology: Topology, device: str, timeout_s: float) -> None:
    """Initialize `jax.distributed` by the process group that exists already.

    Call it before JAX is used, and only once.

    Args:
        topology: ranks of the job.
        device: "cpu", "cuda" or "tpu".
        timeout_s: how long to wait for the other ranks.
    """
    if topology.world_size == 1 or jax.distributed.is_initialized():
        return
    host = process_group.local_address()
    if device == "cpu":
        _bind_gloo_to(host)
    with _coordinator_address(topology, host) as address:
        jax.distributed.initialize(
            address, topology.world_size, topology.rank,
            local_device_ids=None if device == "cpu" else [topology.local_rank],
            initialization_timeout=int(timeout_s), coordinator_bind_address=address,
        )  # fmt: skip
    _unregister_exit_barrier()


def _unregister_exit_barrier() -> None:
    """Let a rank that fails end at once, without waiting for the others and aborting them.

    JAX shuts down at the exit of every process; `shutdown_distributed` is for those that succeed.
    """
    from jax._src import api

    clean_up = getattr(api, "clean_up", None)
    if clean_up is not None:
        atexit.unregister(clean_up)


def shutdown_distributed() -> None:
    """Disconnect from the other ranks when all are done; waits for them."""
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()


@contextlib.contextmanager
def _coordinator_address(topology: Topology, host: str) -> Iterator[str]:
    """Yield, on every rank, a free address at which rank 0 will listen."""
    with contextlib.ExitStack() as stack:
        address = None
        if topology.rank == 0:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = stack.enter_context(socket.socket(family))
            listener.bind((host, 0))
            bracketed = f"[{host}]" if ":" in host else host
            address = f"{bracketed}:{listener.getsockname()[1]}"
        address = process_group.broadcast_value(address)
        stack.close()  # just before JAX listens there
        assert isinstance(address, str)
        yield address


def _bind_gloo_to(host: str) -> None:
    """Have JAX's Gloo listen at this host's address.

    By itself it takes the address of the machine's name, which on many machines is the loopback,
    where others do not reach it.
    """
    from jax._src import distributed, xla_bridge
    from jaxlib import _jax

    def client() -> Any:
        gloo = _jax.make_gloo_tcp_collectives(
            distributed_client=distributed.global_state.client, hostname=host
        )
        return xla_bridge.make_cpu_client(gloo)

    xla_bridge.register_backend_factory("cpu", client, priority=0, fail_quietly=False)


def check_device(device: str) -> None:
    """Start JAX, and check that it computes on the device that was asked for.

    Args:
        device: "cpu", "cuda" or "tpu".

    Raises:
        RequestError: it does not; the message has JAX's own reason.
    """
    try:
        with _plugin_problems() as problems:
            platform = jax.local_devices()[0].platform
    except RuntimeError as error:
        if device == "cpu":
            raise
        raise RequestError(f"--device {device}, which JAX cannot use: {_one_line(error)}") from None
    if platform == {"cuda": "gpu"}.get(device, device):
        return
    ours = [problem for problem in problems if device in problem] or ["JAX gives no reason"]
    set_to = os.environ.get("JAX_PLATFORMS")
    raise RequestError(
        f"--device {device}, but JAX came up on {platform}: {ours[-1]} (JAX_PLATFORMS is {set_to})"
    )


@contextlib.contextmanager
def _plugin_problems() -> Iterator[list[str]]:
    """Keep JAX's tracebacks about plug-ins that do not load from the log; yield what they say.

    JAX looks at the plug-ins of all platforms, whether they are wanted or not.
    """
    problems: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            error = record.exc_info[1] if record.exc_info else None
            because = f": {_one_line(error)}" if error else ""
            problems.append(f"{_one_line(record.getMessage())}{because}")
        return record.exc_info is None

    logger = logging.getLogger("jax._src.xla_bridge")
    logger.addFilter(keep)
    try:
        yield problems
    finally:
        logger.removeFilter(keep)


def _one_line(message: object) -> str:
    return " ".join(str(message).split())[:400]


def local_device() -> jax.Device:
    """Return this process's device; the first call starts JAX."""
    with _plugin_problems():
        return jax.local_devices()[0]


class DataMesh:
    """A mesh of all ranks: places arrays on it, and reduces and gathers them.

    Args:
        topology: ranks of the job.
        shards: shard large arrays of `state` over the ranks with different data.
        by_gloo: XLA on a CPU reduces by gloo, which takes array after array and waits for each: so
            small arrays are reduced in one bucket.
        tp: how many neighbouring ranks have parts of the same layers.
        cp: how many of their groups have parts of the same sequences.
    """

    def __init__(
        self, topology: Topology, shards: bool = False, by_gloo: bool = False, tp: int = 1,
        cp: int = 1,
    ) -> None:  # fmt: skip
        self.device = local_device()
        self._shards, self._by_gloo, self.tp, self._cp = shards, by_gloo, tp, cp
        self._data_rank, self._tp_rank = divmod(topology.rank, tp)
        self._mesh = self._build_mesh(jax.devices(), topology.world_size)

    def _build_mesh(self, devices: Sequence[jax.Device], world_size: int) -> Mesh | None:
        self.num_token_ranks = world_size // self.tp
        if world_size == 1:
            return None
        return Mesh(np.array(devices).reshape(-1, self._cp, self.tp), _ALL_AXES)

    def shard_axis(self, shape: Sequence[int]) -> Axis:
        """Return the axis along which an array of `state` is sharded over ranks with other data.

        Args:
            shape: of the array, or of this rank's part of it (`--tp`), before it is sharded.
        """
        num = self.num_token_ranks
        if not self._shards or num == 1 or math.prod(shape) < _MIN_SHARDED_SIZE:
            return None
        return next((axis for axis, length in enumerate(shape) if length % num == 0), None)

    def local_shard(self, tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
        """Return this rank's shard of a tensor that all ranks with other data have."""
        return tensor if axis is None else tensor.chunk(self.num_token_ranks, axis)[self._data_rank]

    def join_shards(self, of_all_ranks: Sequence[torch.Tensor], axis: int) -> torch.Tensor:
        """Return the tensor of which all ranks' shards are given; see `local_shard`."""
        return torch.cat([*of_all_ranks[self._tp_rank :: self.tp]], axis)

    def global_arrays(self, tree: Any, axis: Axis = None, tp_axis: Axis = None) -> Any:
        """Make global arrays of this rank's arrays, replicated or sharded.

        Args:
            tree: arrays on this device, the same on all ranks or shards.
            axis: along which they are shards; None where ranks with other data have the same.
            tp_axis: along which they are parts (`--tp`); None where ranks with the same data have
                the same.
        """
        return self._place(tree, _spec(axis, tp_axis), lambda array: array)

    def per_rank_arrays(self, tree: Any) -> Any:
        """Make global arrays of arrays that differ between ranks, stacked along a new axis 0."""
        return self._place(tree, PartitionSpec(_ALL_AXES), lambda array: array[None])

    def _place(self, tree: Any, spec: PartitionSpec, form: Callable[[Any], Any]) -> Any:
        mesh = self._mesh
        if mesh is None:
            return tree

        def place(array: Any) -> Any:
            shard = jax.device_put(form(array), self.device)
            shape = _global_shape(shard.shape, spec, mesh)
            sharding = NamedSharding(mesh, spec)
            return jax.make_array_from_single_device_arrays(shape, sharding, [shard])

        return jax.tree.map(place, tree)

    def local_data(self, array: jax.Array, is_per_rank: bool = False) -> jax.Array:
        """Return this rank's part of a global array."""
        if self._mesh is None:
            return array
        shard = array.addressable_data(0)
        return shard[0] if is_per_rank else shard

    def _all_reduce_mean(self, arrays: list[Any]) -> list[Any]:
        """Average arrays over the ranks; inside of `jit` only."""
        if self._mesh is None or not arrays:
            return arrays
        if not self._by_gloo:
            return list(lax.pmean(arrays, _AXIS))
        large = {index: a for index, a in enumerate(arrays) if a.size >= _MIN_UNBUCKETED_SIZE}
        small = {index: a for index, a in enumerate(arrays) if index not in large}
        flat, unravel = ravel_pytree(small)
        flat, large = lax.pmean((flat, large), _AXIS)
        means = large | unravel(flat)
        return [means[index] for index in range(len(arrays))]

    def all_gather(self, array: Any, axis: Axis) -> Any:
        """Gather an array of `state` from its shards; inside of `jit` only."""
        return array if axis is None else lax.all_gather(array, _AXIS, axis=axis, tiled=True)

    def reduce_mean(self, arrays: list[Any], axes: Sequence[Axis]) -> list[Any]:
        """Average arrays over the ranks, and keep this rank's shards; inside of `jit` only."""
        if self._mesh is None or not any(axis is not None for axis in axes):
            return self._all_reduce_mean(arrays)
        num = self.num_token_ranks
        means = iter(
            self._all_reduce_mean([a for a, axis in zip(arrays, axes, strict=True) if axis is None])
        )
        return [
            next(means) if axis is None
            else lax.psum_scatter(array, _AXIS, scatter_dimension=axis, tiled=True) / num
            for array, axis in zip(arrays, axes, strict=True)
        ]  # fmt: skip

    def sum_over_tp(self, arrays: list[Any], is_part: Sequence[bool]) -> list[Any]:
        """Add up those arrays of which ranks with the same data have parts; inside of `jit` only.

        Args:
            arrays: of this rank.
            is_part: of each, whether the whole is the sum over these ranks; else all have it.
        """
        parts = [array for array, is_one in zip(arrays, is_part, strict=True) if is_one]
        if self._mesh is None or not parts:
            return arrays
        flat, unravel = ravel_pytree(parts)
        sums = iter(unravel(lax.psum(flat, TP_AXIS)))
        return [
            next(sums) if is_one else array for array, is_one in zip(arrays, is_part, strict=True)
        ]

    def sum_over_shards(
        self, local_sums: Any, axes: Sequence[Axis], tp_axes: Sequence[Axis]
    ) -> Any:
        """Add up each array's local sum over its shards; inside of `jit` only.

        Args:
            local_sums: (n,) sums over what this rank has of n arrays.
            axes: along which the arrays are sharded.
            tp_axes: along which they are in parts.

        Returns:
            (n,) sums over the global arrays.
        """
        for name, cut_axes in ((_AXIS, axes), ((TP_AXIS,), tp_axes)):
            is_cut = np.array([axis is not None for axis in cut_axes])
            if is_cut.any():
                local_sums = jnp.where(is_cut, lax.psum(local_sums, name), local_sums)
        return local_sums

    def any_rank(self, flag: Any, axes: Sequence[Axis], tp_axes: Sequence[Axis]) -> Any:
        """Return whether the flag, bool (), is set on any rank; inside of `jit` only.

        Args:
            flag: of what this rank has of some arrays.
            axes: along which these are sharded; where none is, all ranks have the same flag.
            tp_axes: along which they are in parts, likewise.
        """
        if all(axis is None for axis in (*axes, *tp_axes)):
            return flag
        return lax.pmax(flag.astype(jnp.int32), _ALL_AXES) > 0

    def jit(self, step: Callable[..., Any], state: Any = None) -> Any:
        """Wrap a step in `jax.jit` over all ranks; it reuses the memory of its first two arguments.

        Args:
            step: on this rank's part of arrays: `step(state, local_state, inputs, local_inputs) ->
                (state, local_state, local)`.
            state: the first argument, where some of it is sharded; the result is sharded alike.
        """
        if self._mesh is None:
            return jax.jit(step, donate_argnums=(0, 1))
        replicated, per_rank = PartitionSpec(), PartitionSpec(_ALL_AXES)
        state_specs = (
            replicated if state is None else jax.tree.map(lambda a: a.sharding.spec, state)
        )

        def step_of_rank(state: Any, local_state: Any, inputs: Any, local_inputs: Any) -> Any:
            local_state, local_inputs = jax.tree.map(lambda a: a[0], (local_state, local_inputs))
            state, *local_results = step(state, local_state, inputs, local_inputs)
            return state, *jax.tree.map(lambda a: a[None], local_results)

        mapped = jax.shard_map(
            step_of_rank, mesh=self._mesh, in_specs=(state_specs, per_rank, replicated, per_rank),
            out_specs=(state_specs, per_rank, per_rank), check_vma=False,
        )  # fmt: skip
        return jax.jit(mapped, donate_argnums=(0, 1))


def _spec(axis: Axis, tp_axis: Axis) -> PartitionSpec:
    cuts = (((TP_AXIS,), tp_axis), (_AXIS, axis))  # parts first, which then are sharded
    num_axes = max((cut + 1 for _, cut in cuts if cut is not None), default=0)
    names_of_axis = [
        tuple(name for names, cut in cuts if cut == index for name in names)
        for index in range(num_axes)
    ]
    return PartitionSpec(*(names or None for names in names_of_axis))


def _global_shape(shard_shape: Sequence[int], spec: PartitionSpec, mesh: Mesh) -> tuple[int, ...]:
    """Return the shape of the array that has shards of this shape."""
    names_of_axis = [(names,) if isinstance(names, str) else names or () for names in spec]
    nums = [math.prod(mesh.shape[name] for name in names) for names in names_of_axis]
    nums += [1] * (len(shard_shape) - len(nums))
    return tuple(length * num for length, num in zip(shard_shape, nums, strict=True))


class AbstractDataMesh(DataMesh):
    """A mesh of ranks that do not run: its arrays are shapes and dtypes alone."""

    def __init__(
        self, topology: Topology, shards: bool = False, tp: int = 1, cp: int = 1
    ) -> None:  # fmt: skip
        devices = jax.devices()[: topology.world_size]
        self.device, self._shards, self._by_gloo = devices[0], shards, False
        self.tp, self._cp = tp, cp
        self._data_rank = self._tp_rank = 0
        self._mesh = self._build_mesh(devices, topology.world_size)

    def _place(self, tree: Any, spec: PartitionSpec, form: Callable[[Any], Any]) -> Any:
        mesh = self._mesh
        if mesh is None:
            return tree

        def place(array: Any) -> Any:
            shard = jax.eval_shape(form, array)
            shape = _global_shape(shard.shape, spec, mesh)
            return jax.ShapeDtypeStruct(shape, array.dtype, sharding=NamedSharding(mesh, spec))

        return jax.tree.map(place, tree)
