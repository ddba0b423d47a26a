"""Transfer of a batch's tensors from the host to an XLA device."""

import torch

from accbench.engines.xla.index_watch import HostCopies
from accbench.errors import RequestError


def send(
    tensors: list[torch.Tensor], device: torch.device, host_copies: HostCopies
) -> list[torch.Tensor]:
    """Return the tensors on the device, each of its own class and with its attributes.

    Args:
        tensors: on the host; those on the device already stay as they are.
        device: XLA's device of this process.
        host_copies: records which host tensors may hold indices.

    Raises:
        RequestError: a tensor is sparse or nested, which XLA does not support.
    """
    import torch_xla.core.xla_model as xm

    # A loop may have moved tensors of the batch itself.
    indices = [i for i, tensor in enumerate(tensors) if tensor.device != device]
    on_host = [_dense(tensors[i]).contiguous() for i in indices]
    sent = xm.send_cpu_data_to_device(on_host, device) if on_host else []
    result = list(tensors)
    for i, tensor in zip(indices, sent, strict=True):
        result[i] = _as_class_of(tensors[i], tensor)
        if not tensor.is_floating_point() or tensor.dim() < 2:
            host_copies.note(result[i], tensors[i])
    return result


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    if tensor.is_nested:
        kind = "nested"
    elif tensor.layout is not torch.strided:
        kind = str(tensor.layout).removeprefix("torch.")
    elif is_traceable_wrapper_subclass(tensor):
        kind = type(tensor).__name__
    else:
        return tensor.as_subclass(torch.Tensor)
    raise RequestError(
        f"engine xla has no {kind} tensors, and the batch has one of shape "
        f"{tuple(tensor.shape) if not tensor.is_nested else '(N, *, ...)'}; pad it or make it "
        "dense, or use another --engine"
    )


def _as_class_of(before: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
    if type(before) in (torch.Tensor, torch.nn.Parameter):
        return sent
    converted = sent.as_subclass(type(before))
    converted.__dict__.update(before.__dict__)
    return converted
