"""CUDA's autocast rules and compositions for CPU tensors: what eager PyTorch would do there."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch.utils._pytree import tree_leaves, tree_map

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


class _AutocastCall(Exception):
    """The call that autocast makes: operation, arguments and keyword arguments."""


OpOverrides = Mapping[Any, Callable[..., torch.Tensor]]


@contextmanager
def autocast(dtype: torch.dtype, op_overrides: OpOverrides | None = None) -> Iterator[None]:
    """Apply the casts of `torch.autocast("cuda", dtype)` to CPU tensors.

    Args:
        dtype: float16 or bfloat16.
        op_overrides: operation -> what is called in its place, with its arguments after the casts.
    """
    rules = CudaRules(op_overrides or {})
    with rules.active(), rules.autocast(dtype):
        yield


class CudaRules:
    """Casts and composes operations on CPU tensors as torch does on CUDA.

    Autograd needs a CUDA driver for CUDA tensors, even for those without content; and autocast's
    kernels for CUDA ignore all other tensors, except XLA's. So kernels in front of autograd ask
    them: what would you call if these were XLA's? Those kernels are registered, for the block only,
    for the autocast of a device type that torch has nothing for.

    Args:
        op_overrides: operation -> what is called in its place, behind autocast; by default the
            compositions that torch has on CUDA.
    """

    _KEY = DispatchKey.AutocastPrivateUse1  # type: ignore[attr-defined]
    _DEVICE_TYPE = "privateuseone"
    KEYS = DispatchKeySet(_KEY)

    def __init__(self, op_overrides: OpOverrides | None = None) -> None:
        self.op_overrides: OpOverrides = (
            _CUDA_COMPOSITIONS if op_overrides is None else op_overrides
        )
        overridden = {operation.name() for operation in self.op_overrides}
        self._names = (
            _with_rules() | overridden | (_WITHOUT_RULES if op_overrides is None else set())
        )
        self.is_probing = False
        """Whether a call only asks autocast's kernels, and is no part of the step."""
        self.cast_weights: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        """(id of a parameter, dtype) -> its cast copy, made once for all its uses."""

    @contextmanager
    def active(self) -> Iterator[None]:
        """Activate these rules in the block."""
        was_enabled = torch.is_autocast_enabled(self._DEVICE_TYPE)
        others, aten = (torch.library.Library(ns, "IMPL", self._KEY.name) for ns in ("_", "aten"))
        try:
            others.fallback(torch.library.fallthrough_kernel)
            for name in self._names:
                aten.impl(name, partial(self._call, _operation(name)))
            torch.set_autocast_enabled(self._DEVICE_TYPE, True)
            with torch._C._IncludeDispatchKeyGuard(self._KEY):
                yield
        finally:
            torch.set_autocast_enabled(self._DEVICE_TYPE, was_enabled)
            for library in (aten, others):
                library._destroy()

    @contextmanager
    def autocast(self, dtype: torch.dtype | None) -> Iterator[None]:
        """Do in the block what `torch.autocast("cuda", dtype)` does on a GPU; None turns it off.

        It sets torch's flags directly, for `torch.autocast` turns itself off without a GPU.
        """
        was_enabled, old_dtype = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
        try:
            torch.set_autocast_enabled("cuda", dtype is not None)
            torch.set_autocast_dtype("cuda", dtype or old_dtype)
            yield
        finally:
            torch.set_autocast_enabled("cuda", was_enabled)
            torch.set_autocast_dtype("cuda", old_dtype)
            self.cast_weights.clear()

    def _call(self, operation: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_probing:
            raise _AutocastCall(operation, args, kwargs)
        if torch.is_autocast_enabled("cuda") and operation.name() in _with_rules():
            operation, args, kwargs = self._as_cast(operation, args, kwargs)
        with torch._C._ExcludeDispatchKeyGuard(self.KEYS):
            return self.op_overrides.get(operation, operation)(*args, **kwargs)

    def _as_cast(self, operation: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
        """Return the operation and the arguments that autocast calls in place of these."""
        xla_args, xla_kwargs = tree_map(_xla_like, (args, kwargs))
        self.is_probing = True
        try:
            operation.redispatch(DispatchKeySet(DispatchKey.AutocastCUDA), *xla_args, **xla_kwargs)
            return operation, args, kwargs
        except _AutocastCall as reached:
            called, new_args, new_kwargs = reached.args
        finally:
            self.is_probing = False
        originals = iter(tensors_in((args, kwargs)))

        def cast(leaf: Any) -> Any:
            return self._cast(next(originals), leaf.dtype) if is_tensor(leaf) else leaf

        return (called, *tree_map(cast, (new_args, new_kwargs)))

    def _cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if dtype == tensor.dtype:
            return tensor
        if not (tensor.is_leaf and tensor.requires_grad):
            return tensor.to(dtype)
        key = id(tensor), dtype
        if key not in self.cast_weights:
            self.cast_weights[key] = tensor.to(dtype)
        return self.cast_weights[key]


@cache
def _with_rules() -> frozenset[str]:
    """Return the operations that autocast has a kernel for on CUDA."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return frozenset(
        name
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and has_kernel(name, "AutocastCUDA")
    )


def _operation(name: str) -> Any:
    packet, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(_aten, packet), overload or "default")


def _xla_like(leaf: Any) -> Any:
    """Return an XLA tensor like this one, to which autocast's rules for CUDA apply."""
    if not is_tensor(leaf):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="xla:0")


# Operations that torch composes differently on CUDA and on the CPU.


def _dropout(values: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    if train and 0 < p < 1:
        return _aten.native_dropout(values, p, train)[0]
    return _aten.dropout(values, p, train)


def _softmax(
    fused: Any, composed: Any, values: torch.Tensor, dim: int, dtype: torch.dtype | None = None
) -> torch.Tensor:
    if values.dtype is torch.float16 and dtype is torch.float32:
        return fused(values, dim, True)
    return composed(values, dim, dtype)


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    *, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Call one of the fused kernels, which move the same bytes."""
    if query.dim() != 4 or enable_gqa:
        return _aten.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if attn_mask is None and query.dtype in _HALF:
        return _aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, scale=scale
        )[0]
    if attn_mask is not None:
        if attn_mask.dtype is torch.bool:
            zeros = torch.zeros_like(attn_mask, dtype=query.dtype)
            attn_mask = zeros.masked_fill_(attn_mask.logical_not(), -math.inf)
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    return _aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
    )[0]


_CUDA_COMPOSITIONS: OpOverrides = {
    _aten.dropout.default: _dropout,
    _aten.softmax.int: partial(_softmax, _aten._softmax, _aten.softmax.int),
    _aten.log_softmax.int: partial(_softmax, _aten._log_softmax, _aten.log_softmax.int),
    _aten.scaled_dot_product_attention.default: _attention,
}
# Operations without autocast rules; autocast calls these norms for those without a dtype.
_WITHOUT_RULES = {"aten::dropout", "aten::norm.ScalarOpt_dtype", "aten::norm.ScalarOpt_dim_dtype"}


def is_tensor(leaf: Any) -> bool:
    """Return whether a leaf of a tree of arguments is a tensor."""
    return isinstance(leaf, torch.Tensor)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in a tree of arguments, in their order."""
    return [leaf for leaf in tree_leaves(tree) if is_tensor(leaf)]
