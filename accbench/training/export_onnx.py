"""Export of a trained network to ONNX: uint8 images in, logits out, for any batch size."""

import contextlib
import importlib.util
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from accbench.errors import RequestError
from accbench.models.tasks.classification import logits_of
from accbench.system import extras

# Largest difference allowed between its logits and torch's, as a fraction of the largest logit.
_TOLERANCE = 1e-4
_NUM_TRIED = 3


def check_installed() -> None:
    """Check that the packages for ONNX are installed.

    Raises:
        RequestError: one is missing.
    """
    for package in ("onnx", "onnxscript", "onnxruntime"):
        if importlib.util.find_spec(package) is None:
            raise RequestError(
                f"--format onnx needs {package}, which is not installed: "
                + extras.install_command("onnx")
            )


class LogitsOnly(nn.Module):
    """A classifier that returns its logits, and nothing of what else it returns beside them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        """Compute logits (N, num_classes) from images as the model takes them."""
        return logits_of(self.model(images_NCHW))


def write(model: LogitsOnly, image_size: int, path: Path, int8: bool) -> float:
    """Write `path`, and return the largest difference of its logits from torch's.

    The difference is a fraction of the largest logit. The input `images` is
    (N, 3, image_size, image_size) uint8, not normalized; the output `logits` is (N, num_classes)
    float32.

    Args:
        model: in evaluation mode, on the host.
        image_size: height and width of the images in pixels.
        path: the file to write.
        int8: store weights as bytes and quantize activations dynamically, by ONNX Runtime; the
            logits then differ from torch's by design.

    Raises:
        RequestError: the network cannot be written as ONNX, or would compute something else.
        OSError: the file cannot be written.
    """
    shape_NCHW = (_NUM_TRIED, 3, image_size, image_size)
    generator = torch.Generator().manual_seed(0)
    images_NCHW = torch.randint(0, 256, shape_NCHW, dtype=torch.uint8, generator=generator)
    with _silenced():
        try:
            with torch.no_grad():
                expected_NC = model(images_NCHW)
            _check_shape(expected_NC)
            # Left to itself the exporter falls back to recording one forward pass, and so to one
            # path through a model with data-dependent control flow.
            program = torch.export.export(
                model, (images_NCHW[:2],), dynamic_shapes=({0: torch.export.Dim("batch")},)
            )
            network = torch.onnx.export(
                program, (), dynamo=True, verbose=False,
                input_names=["images"], output_names=["logits"],
            )  # fmt: skip
            assert network is not None
        except RequestError:
            raise
        except Exception as failure:
            # The exporter has many exception classes, with messages that fill pages.
            why = next(iter(str(failure).strip().splitlines()), type(failure).__name__)
            raise RequestError(f"the network cannot be written as ONNX: {why}") from failure
        network.save(str(path), external_data=False)
        if int8:
            _quantize(path)
        error = _relative_error(Network(path)(images_NCHW), expected_NC)
    if not int8 and not error <= _TOLERANCE:
        raise RequestError(f"ONNX Runtime's logits are {error:.1e} of the largest from torch's")
    return error


def _check_shape(logits: torch.Tensor) -> None:
    if logits.dim() != 2:
        raise RequestError(
            "--format onnx is for image classification, and the model's logits are of shape "
            f"{tuple(logits.shape)}, not (images, classes)"
        )


def _quantize(path: Path) -> None:
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    network = onnx.load(str(path))
    # Shapes that torch recorded for weights which the quantizer transposes.
    del network.graph.value_info[:]
    # Unsigned: the only convolutions of integers that ONNX Runtime has on a CPU.
    quantize_dynamic(network, str(path), weight_type=QuantType.QUInt8)


class Network(nn.Module):
    """A model that runs a file of `write` in ONNX Runtime."""

    def __init__(self, path: Path) -> None:
        import onnxruntime

        super().__init__()
        providers = ["CPUExecutionProvider"]
        self.session = onnxruntime.InferenceSession(str(path), providers=providers)

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        """Compute float32 (N, num_classes) from uint8 (N, 3, image_size, image_size)."""
        (logits,) = self.session.run(None, {"images": images_NCHW.contiguous().numpy()})
        return torch.from_numpy(logits)


def _relative_error(logits_NC: torch.Tensor, expected_NC: torch.Tensor) -> float:
    error = float((logits_NC - expected_NC).abs().max())
    return error / (float(expected_NC.abs().max()) or 1.0)


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Silence warnings of the exporter and the quantizer, whose results are checked here."""
    with warnings.catch_warnings(), open(os.devnull, "w") as nowhere:
        warnings.simplefilter("ignore")
        logging.disable(logging.ERROR)
        try:
            with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
                yield
        finally:
            logging.disable(logging.NOTSET)
