"""The model contract: a network, its batches and its loss.

`accbench/models/<family>.py` defines `class Family` with `names`, its models' names, and
`spec(name)`, which returns a `Spec`. A family with `prefixed = True` gets whatever follows
its name and a colon, as in `timm:vit_small_patch16_224`. Any other model is named as
`package.module:attribute`: a `Spec`, or a callable that returns a module for images.
"""

import dataclasses
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from accbench.config import TaskConfig, plugins
from accbench.errors import RequestError
from accbench.models.tasks import trainable
from accbench.models.tasks.classification import Classifier, ImageClassification
from accbench.models.tasks.spec import IMAGES, TOKENS, Spec

__all__ = ["IMAGES", "TOKENS", "Classifier", "ImageClassification", "Spec"]


def names() -> list[str]:
    """Return every family's model names, and `FAMILY:NAME` for each prefixed family.

    Families come from accbench and from installed plug-in packages.
    """
    families = plugins.classes("models")
    prefixed = [f"{n}:NAME" for n, family in families.items() if _is_prefixed(family)]
    return [*sorted(n for family in families.values() for n in family.names), *prefixed]


def _is_prefixed(family: Any) -> bool:
    return bool(getattr(family, "prefixed", False))


def of_task(task: TaskConfig) -> Any:
    """Return the task's model spec, with the loss options and sizes that its flags ask for.

    Raises:
        RequestError: the model is unknown, or its loss does not support a flag.
    """
    spec = resolve(task.model, task.image_size, task.seq_len)
    if task.label_smoothing and not hasattr(spec, "label_smoothing"):
        raise RequestError(f"--label_smoothing: the loss of --model {task.model} has none")
    if (task.mixup or task.cutmix) and not getattr(spec, "mixes", False):
        raise RequestError(
            f"--mixup and --cutmix mix labels, which the loss of --model {task.model} cannot take"
        )
    if task.label_smoothing:
        spec = dataclasses.replace(spec, label_smoothing=task.label_smoothing)
    families = plugins.classes("models").items()
    family = next((name for name, of in families if task.model in of.names), "")
    if family in task.options:
        # An option of a family is a field of its specs.
        spec = dataclasses.replace(spec, **dataclasses.asdict(task.options[family]))
    return spec


def shards_classes(task: TaskConfig) -> bool:
    """Return whether a task's workers share the classes of its model's head out (PartialFC)."""
    return task.script is None and getattr(of_task(task), "sample_rate", None) is not None


def resolve(name: str, image_size: int, seq_len: int = TaskConfig.seq_len) -> Any:
    """Return the spec of a model.

    Args:
        name: a family's model, FAMILY:NAME or `package.module:attribute`.
        image_size: height and width in pixels, for image models.
        seq_len: tokens per sample, for language models.

    Raises:
        RequestError: the model is unknown; the message lists the known ones.
    """
    spec = _find_spec(name)
    if dataclasses.is_dataclass(spec):
        sizes = {"image_size": image_size, "seq_len": seq_len}
        fields = {field.name for field in dataclasses.fields(spec)}
        spec = dataclasses.replace(spec, **{k: v for k, v in sizes.items() if k in fields})  # type: ignore[type-var]
    return spec


def is_user_model(name: str) -> bool:
    """Return whether `name` is `package.module:attribute`, code outside every family."""
    prefix, colon, _ = name.partition(":")
    return bool(colon) and not _is_prefixed(plugins.classes("models").get(prefix))


def _find_spec(name: str) -> Any:
    if is_user_model(name):
        return _user_spec(name)
    families = plugins.classes("models")
    prefix, colon, rest = name.partition(":")
    if colon:
        return families[prefix].spec(rest)
    for family in families.values():
        if name in family.names:
            return family.spec(name)
    known = ", ".join(names())
    raise RequestError(f"unknown model {name!r}; there are: {known}, or package.module:attribute")


def _user_spec(name: str) -> Any:
    model = _import_attribute(name)
    if isinstance(model, type) and issubclass(model, Spec):
        model = model()
    if all(hasattr(model, method) for method in ("build", "loss", "synthetic_batch")):
        return model
    if isinstance(model, nn.Module):
        raise RequestError(
            f"--model {name} is a network that was built already; name its class, or a function "
            "that builds it, which each worker calls with its own seed"
        )
    if not callable(model):
        raise RequestError(f"--model {name} is neither callable nor a spec")
    more = [other for other in _required(model) if other != "num_classes"]
    if more:
        raise RequestError(
            f"--model {name} wants {', '.join(more)}, and is called with num_classes alone; name a "
            "function that knows the rest"
        )

    def build_net(num_classes: int) -> nn.Module:
        takes_classes = _accepts(model, "num_classes")
        net = model(num_classes=num_classes) if takes_classes else model()
        if not isinstance(net, nn.Module):
            raise RequestError(
                f"--model {name} gave {type(net).__name__}, not a torch.nn.Module; it is called "
                + ("with num_classes" if takes_classes else "without arguments")
            )
        if len(_required(net.forward)) > 1:
            raise RequestError(
                f"--model {name} is called with images alone, and its forward wants "
                f"{', '.join(_required(net.forward))}; a spec of your own says what a batch is and "
                "how the model is called with it (docs/models.md)"
            )
        return trainable.plain(net)

    return ImageClassification(name, build_net)


def _required(function: Callable[..., Any]) -> list[str]:
    """Return the names of a function's required parameters."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a built-in without a signature
        return []
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]


def _accepts(function: Callable[..., Any], argument: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a built-in without a signature
        return True
    kinds = [parameter.kind for parameter in parameters.values()]
    return argument in parameters or inspect.Parameter.VAR_KEYWORD in kinds


def _import_attribute(name: str) -> Any:
    module_name, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), attribute]):
        raise RequestError(f"--model {name} is not of the form package.module:callable")
    # `python script.py` puts the script's folder first on sys.path. The current folder goes last
    # here: a file in it must not hide a module that an installed package imports.
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise RequestError(f"--model {name}: {error}") from None
