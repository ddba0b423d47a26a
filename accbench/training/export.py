"""A checkpoint's weights as other tools load them: `accbench export RUN OUT`."""

from pathlib import Path
from typing import Literal

import torch
from torch import nn

from accbench import models
from accbench.engines import optimizers
from accbench.engines.state import Tensors
from accbench.errors import RequestError
from accbench.training import checkpoint_file, checkpoints

Format = Literal["state_dict", "safetensors"]


def export(run: Path, out: Path, format: Format, average: bool = True) -> int:
    """Write the weights of a run's newest whole checkpoint, or of a checkpoint's own folder.

    Args:
        average: the moving average of the weights, where there is one.

    Names are the network's own, as torchvision's models load them.

    Returns the step that the weights are of.

    Raises:
        RequestError: no checkpoint, another model, or a place that cannot be written.
    """
    found = checkpoints.find(str(run), None, print)
    assert found is not None
    saved = checkpoint_file.read(found)
    tensors = optimizers.of_averages(saved.state) if average else saved.state.model
    model = _model_of(saved.facts, tensors)
    part = out.with_name(f".{out.name}.part")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _write(network_state(model), part, format)
        part.rename(out)
    except OSError as error:
        raise RequestError(f"cannot write {out}: {error.strerror}") from None
    finally:
        part.unlink(missing_ok=True)
    return saved.facts.step


def _model_of(facts: checkpoint_file.Facts, tensors: Tensors) -> nn.Module:
    model: nn.Module = models.resolve(facts.model, facts.image_size).build(facts.num_classes)
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if own.keys() != tensors.keys():
        other = sorted(own.keys() ^ tensors.keys())[0]
        raise RequestError(
            f"--model {facts.model} now builds another network than the one that was "
            f"saved: {other} is in one of them alone"
        )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
    return model.eval()


def network_state(model: nn.Module) -> Tensors:
    """The state_dict of the network, without the normalisation of images before it."""
    net = getattr(model, "net", model)
    return {name: tensor.detach().contiguous() for name, tensor in net.state_dict().items()}


def _write(tensors: Tensors, path: Path, format: Format) -> None:
    if format == "state_dict":
        torch.save(tensors, path)
        return
    from safetensors.torch import save_file

    # A tied weight has several names there, which this format writes out each.
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path)
