"""A checkpoint's weights as other tools load them: `accbench export RUN OUT`."""

from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from accbench import config, models, plugins
from accbench.engines import optimizers
from accbench.engines.state import Tensors
from accbench.errors import RequestError
from accbench.models import trainable
from accbench.training import checkpoint_file, checkpoints, export_onnx
from accbench.training.process_group import Topology

Format = Literal["state_dict", "safetensors", "onnx", "onnx_int8"]


def export(
    run: Path, out: Path, format: Format, average: bool = True, evaluate: bool = False
) -> str:
    """Write the weights of a run's newest whole checkpoint, or of a checkpoint's own folder.

    Args:
        average: the moving average of the weights, where there is one.
        evaluate: also score what ONNX Runtime reads there on the run's validation set.

    Of PyTorch's formats the names are the network's own, as torchvision's models load them.

    Returns a line on what was written.

    Raises:
        RequestError: no checkpoint, another model, no data to evaluate, or a place that cannot
            be written.
    """
    if format.startswith("onnx"):
        export_onnx.check_installed()
    elif evaluate:
        raise RequestError(
            f"--evaluate is of --format onnx and onnx_int8; {format} holds the weights unchanged"
        )
    found = checkpoints.find(str(run), None, print)
    assert found is not None
    saved = checkpoint_file.read(found)
    tensors = optimizers.of_averages(saved.state) if average else saved.state.model
    model = _model_of(saved.facts, tensors)
    loader = _validation_set(found.parent.parent / config.CONFIG_FILE) if evaluate else None
    part = out.with_name(f".{out.name}.part")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        note = _write(model, saved.facts.image_size, part, format)
        if loader is not None:
            spec = models.resolve(saved.facts.model, saved.facts.image_size)
            of_onnx, number = _top1(spec, export_onnx.Network(part), loader)
            of_torch, _ = _top1(spec, model, loader)
            note += f"; top-1 of {number} held-out samples {of_onnx:.2%}, torch {of_torch:.2%}"
        part.rename(out)
    except OSError as error:
        raise RequestError(f"cannot write {out}: {error.strerror}") from None
    finally:
        part.unlink(missing_ok=True)
    return f"weights after step {saved.facts.step} in {out}{note}"


def _validation_set(config_file: Path) -> Any:
    """The loader of a run's validation set, for one worker.

    Raises:
        RequestError: the run's flags or its data are not there, or it has no such set.
    """
    task = config.parse([f"--config={config_file}"])
    name, location = config.data_name(task.data)
    source = plugins.load("data", name)
    source.check(location)
    loader = source(location, task, task.options.get(name), Topology()).eval_loader()
    if loader is None:
        raise RequestError(f"--evaluate: --data {task.data} has no validation set")
    return loader


def _top1(spec: Any, model: nn.Module, loader: Any) -> tuple[float, int]:
    """The part of the samples whose best class is right, 0..1, and their number."""
    with torch.no_grad():
        sums = sum(spec.score(model, batch).double() for batch in loader)
    _, top1, _, number = sums.tolist()
    return top1 / number, int(number)


def _model_of(facts: checkpoint_file.Facts, tensors: Tensors) -> nn.Module:
    spec = models.resolve(facts.model, facts.image_size)
    model = trainable.unwrapped(spec.build(facts.num_classes))
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


def _write(model: nn.Module, image_size: int, path: Path, format: Format) -> str:
    if format.startswith("onnx"):
        apart = export_onnx.write(model, image_size, path, int8=format == "onnx_int8")
        return f", logits of random images within {apart:.1e} of the largest of torch's"
    tensors = network_state(model)
    if format == "state_dict":
        torch.save(tensors, path)
    else:
        from safetensors.torch import save_file

        # A tied weight has several names there, which this format writes out each.
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, path)
    return ""
