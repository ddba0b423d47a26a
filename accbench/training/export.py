"""The command `accbench export RUN OUT`: write a checkpoint's weights for other tools."""

from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from accbench import config, models
from accbench.config import plugins
from accbench.distributed.process_group import Topology
from accbench.engines.common import model_state, optimizer_state
from accbench.engines.common.training_state import Tensors
from accbench.errors import RequestError
from accbench.models.tasks import trainable
from accbench.training import checkpoint_file, checkpoints, export_onnx

Format = Literal["state_dict", "safetensors", "onnx", "onnx_int8"]


def export(
    run: Path, out: Path, format: Format, average: bool = True, evaluate: bool = False
) -> str:
    """Write the weights of a run's newest whole checkpoint, or of a checkpoint's own folder.

    In PyTorch's formats the names are the network's own, as torchvision's models load them.

    Args:
        run: the run's folder, or a checkpoint's.
        out: the file to write.
        format: its format.
        average: export the moving average of the weights, if there is one.
        evaluate: also score the exported network on the run's validation set, by ONNX Runtime.

    Returns:
        A line on what was written.

    Raises:
        RequestError: there is no checkpoint, the model is another, there is no data to evaluate,
            or the file cannot be written.
    """
    if format.startswith("onnx"):
        export_onnx.check_installed()
    elif evaluate:
        raise RequestError(
            f"--evaluate is of --format onnx and onnx_int8; {format} holds the weights unchanged"
        )
    if out.is_dir():
        raise RequestError(f"cannot write {out}: it is a folder; name a file in it")
    folder = checkpoints.find(str(run), None, print)
    assert folder is not None
    saved = checkpoint_file.read(folder)
    tensors = optimizer_state.averaged_tensors(saved.state) if average else saved.state.model
    model = _model_of(saved.facts, tensors, saved.state.extra)
    loader = _validation_set(folder.parent.parent / config.CONFIG_FILE) if evaluate else None
    part = out.with_name(f".{out.name}.part")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        note = _write(model, saved.facts.image_size, part, format)
        if loader is not None:
            spec = models.resolve(saved.facts.model, saved.facts.image_size)
            onnx_top1, number = _top1(spec, export_onnx.Network(part), loader)
            torch_top1, _ = _top1(spec, model, loader)
            note += f"; top-1 of {number} held-out samples {onnx_top1:.2%}, torch {torch_top1:.2%}"
        part.rename(out)
    except OSError as error:
        raise RequestError(f"cannot write {out}: {error.strerror}") from None
    finally:
        part.unlink(missing_ok=True)
    return f"weights after step {saved.facts.step} in {out}{note}"


def _validation_set(config_file: Path) -> Any:
    """Return the loader of a run's validation set, for one worker.

    Raises:
        RequestError: the run's flags or its data are missing, or it has no validation set.
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
    """Compute top-1 accuracy, 0..1, and the number of samples."""
    with torch.no_grad():
        sums = sum(spec.score(model, batch).double() for batch in loader)
    _, top1, _, number = sums.tolist()
    return top1 / number, int(number)


def _model_of(
    facts: checkpoint_file.CheckpointFacts, tensors: Tensors, extra: dict[str, Any] | None
) -> nn.Module:
    spec = models.resolve(facts.model, facts.image_size)
    model = trainable.plain(spec.build(facts.num_classes))
    try:
        model_state.load(model, tensors, extra)
    except (ValueError, RuntimeError) as error:
        raise RequestError(
            f"--model {facts.model} now builds another network than the one that was saved: "
            f"{' '.join(str(error).split())}"
        ) from None
    return model.eval()


def network_state(model: nn.Module) -> dict[str, Any]:
    """Return the network's state_dict, without the normalization of images before it.

    Extra state is in it as its modules return it.
    """
    net = getattr(model, "net", model)
    return {
        name: value.detach().contiguous() if isinstance(value, torch.Tensor) else value
        for name, value in net.state_dict().items()
    }


def _write(model: nn.Module, image_size: int, path: Path, format: Format) -> str:
    if format.startswith("onnx"):
        error = export_onnx.write(model, image_size, path, int8=format == "onnx_int8")
        return f", logits of random images within {error:.1e} of the largest of torch's"
    state = network_state(model)
    if format == "state_dict":
        torch.save(state, path)
        return ""
    return _write_safetensors(state, path)


def _write_safetensors(state: dict[str, Any], path: Path) -> str:
    """Write the tensors, and return a note on what the format cannot hold."""
    from safetensors.torch import save_file

    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    try:
        # A tied weight has several names in the state_dict; this format stores each of them.
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, path)
    except KeyError as error:
        raise RequestError(
            f"--format safetensors has no type {error.args[0]}, which the network's tensors have; "
            "use --format state_dict"
        ) from None
    others = [name for name in state if name not in tensors]
    if not others:
        return ""
    return f", without {', '.join(others)}, which are not tensors: --format state_dict has them"
