"""The command `accbench export RUN OUT`: write a checkpoint's weights for other tools."""

import collections
import contextlib
import dataclasses
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from accbench import config, models
from accbench.config import plugins
from accbench.distributed.process_group import Topology
from accbench.engines.common import model_state, optimizer_state
from accbench.engines.common.training_state import Tensors
from accbench.errors import RequestError, errors_behind
from accbench.models.tasks import trainable
from accbench.models.tasks.classification import sums_of_logits
from accbench.models.tasks.spec import Wrapper
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
        RequestError: there is no checkpoint, the model is another, or no image classifier for ONNX,
            there is no data to evaluate, or the file cannot be written.
    """
    if format.startswith("onnx"):
        export_onnx.check_installed()
    elif evaluate:
        raise RequestError(
            f"--evaluate is of --format onnx and onnx_int8; {format} holds the weights unchanged"
        )
    if out.is_dir():
        raise RequestError(f"cannot write {out}: it is a folder; name a file in it")
    folder, saved = _read_checkpoint(run)
    config_file = folder.parent.parent / config.CONFIG_FILE
    spec = _spec_of(saved.facts, config_file)
    if format.startswith("onnx"):
        _check_takes_images(spec, saved.facts.model, format)
    tensors = optimizer_state.averaged_tensors(saved.state) if average else saved.state.model
    model = _load_model(spec, saved.facts, tensors, saved.state.extra)
    loader = _validation_set(config_file) if evaluate else None
    part = out.with_name(f".{out.name}.part")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        note = _write(model, saved.facts.image_size, part, format)
        if loader is not None:
            onnx_top1, number = _top1(export_onnx.Network(part), loader)
            torch_top1, _ = _top1(export_onnx.LogitsOnly(model), loader)
            note += f"; top-1 of {number} held-out samples {onnx_top1:.2%}, torch {torch_top1:.2%}"
        part.rename(out)
    except OSError as error:
        raise RequestError(f"cannot write {out}: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):
            part.unlink()
    return f"weights after step {saved.facts.step} in {out}{note}"


def _read_checkpoint(run: Path) -> tuple[Path, checkpoint_file.Checkpoint]:
    """Read a run's newest whole checkpoint, or the checkpoint that the folder is.

    Returns:
        Its folder, as an absolute path, and the checkpoint.

    Raises:
        RequestError: there is none, or it is damaged.
    """
    if not run.is_dir():
        raise RequestError(f"{run}: there is no such folder")
    try:
        if (run / checkpoint_file.JSON_FILE).exists():
            folder: Path | None = run
            checkpoint_file.verify(run)
        else:
            folder = checkpoints.newest(run, print)
    except checkpoint_file.DamagedError as error:
        raise RequestError(f"{run}: no checkpoint in it is whole ({error})") from None
    if folder is None:
        raise RequestError(f"{run}: no checkpoint is in it")
    return folder.absolute(), checkpoint_file.read(folder)


def _spec_of(facts: checkpoint_file.CheckpointFacts, config_file: Path) -> Any:
    """Return the spec by which a checkpoint's model was built.

    A network may depend on `--seq_len` and on the options of its family, which the checkpoint does
    not hold and the run's flags do. Where these are missing or cannot be read, as those of another
    version, or are of another run, as around a copied checkpoint, they have their defaults.
    """
    try:
        task = config.parse([f"--config={config_file}"])
    except RequestError:
        task = None
    if task is None or (task.model, task.image_size) != (facts.model, facts.image_size):
        return models.resolve(facts.model, facts.image_size)
    # Flags of the loss, which the network does not depend on, are not to refuse it.
    return models.of_task(dataclasses.replace(task, label_smoothing=0.0, mixup=0.0, cutmix=0.0))


def _check_takes_images(spec: Any, model: str, format: Format) -> None:
    kind = getattr(spec, "takes", models.IMAGES)
    if kind != models.IMAGES:
        raise RequestError(
            f"--format {format} is for image classification, and --model {model} takes {kind}; use "
            "--format state_dict or safetensors"
        )


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


def _top1(model: nn.Module, loader: Any) -> tuple[float, int]:
    """Compute top-1 accuracy, 0..1, of a model that returns logits, and the number of samples."""
    sums = torch.zeros(4, dtype=torch.float64)
    with torch.no_grad():
        for images_NCHW, labels_N in loader:
            sums += sums_of_logits(model(images_NCHW), labels_N)
    _, top1, _, number = sums.tolist()
    return top1 / number, int(number)


def _load_model(
    spec: Any,
    facts: checkpoint_file.CheckpointFacts,
    tensors: Tensors,
    extra: dict[str, Any] | None,
) -> nn.Module:
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
    """Return the network's state_dict, without accbench's own wrapper around the network.

    Extra state is in it as its modules return it, and so are their versions (`_metadata`).
    """
    # A class derived from a wrapper may have weights of its own.
    if isinstance(model, Wrapper) and len(_saved(model)) == len(_saved(model.net)):
        model = model.net
    saved = model.state_dict()
    state = collections.OrderedDict(
        (name, value.detach().contiguous() if isinstance(value, torch.Tensor) else value)
        for name, value in saved.items()
    )
    if hasattr(saved, "_metadata"):
        state._metadata = saved._metadata  # type: ignore[attr-defined]
    return state


def _saved(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *model_state.saved_buffers(module)]


def _write(model: nn.Module, image_size: int, path: Path, format: Format) -> str:
    """Write the file, and return a note on it.

    Raises:
        OSError: it cannot be written.
    """
    if format.startswith("onnx"):
        logits_only = export_onnx.LogitsOnly(model)
        error = export_onnx.write(logits_only, image_size, path, int8=format == "onnx_int8")
        return f", logits of random images within {error:.1e} of the largest of torch's"
    state = network_state(model)
    if format == "state_dict":
        _write_state_dict(state, path)
        return ""
    return _write_safetensors(state, path)


def _write_state_dict(state: dict[str, Any], path: Path) -> None:
    try:
        # Of a path that it cannot open torch says that there is no such folder.
        with path.open("wb") as file:
            torch.save(state, file)
    except RuntimeError as error:
        # From the end of torch's archive, which is not at the place where it should be.
        why = next((cause for cause in errors_behind(error) if isinstance(cause, OSError)), None)
        if why is None:
            raise
        raise why from None


def _write_safetensors(state: dict[str, Any], path: Path) -> str:
    """Write the tensors, and return a note on what the format cannot hold."""
    from safetensors import SafetensorError
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
    except SafetensorError as error:  # its word for a full disk, too
        raise OSError(0, str(error)) from None
    others = [name for name in state if name not in tensors]
    if not others:
        return ""
    return f", without {', '.join(others)}, which are not tensors: --format state_dict has them"
