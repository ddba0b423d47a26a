"""Models that torch_xla cannot train."""

from torch import nn

from accbench.errors import RequestError


def refuse(net: nn.Module) -> None:
    """Check that a model has only kinds of parameters and gradients that torch_xla has.

    Raises:
        RequestError: it has complex parameters or sparse gradients.
    """
    for name, parameter in net.named_parameters():
        if parameter.is_complex():
            raise RequestError(
                f"torch_xla has no complex parameters, as {name} is: no norms, no gradients of "
                "several operations on them; use --engine jax, inductor or ddp"
            )
    for name, module in net.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise RequestError(
                f"engine xla has no sparse gradients, which {name or 'the model'} has "
                "(sparse=True); leave that out, or use another --engine"
            )
