"""A trained network as ONNX: bytes of images in, logits out, for any number of images."""

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
from accbench.system import extras

# What its logits may differ by from torch's, as a part of the largest.
_TOLERANCE = 1e-4
_NUM_TRIED = 3


def check_installed() -> None:
    """Look for the packages.

    Raises:
        RequestError: one is missing.
    """
    for package in ("onnx", "onnxscript", "onnxruntime"):
        if importlib.util.find_spec(package) is None:
            raise RequestError(
                f"--format onnx needs {package}, which is not installed: "
                + extras.install_command("onnx")
            )


def write(model: nn.Module, image_size: int, path: Path, int8: bool) -> float:
    """Write `path`; returns how far its logits are from torch's, as a part of the largest.

    The input `images` is (N, 3, image_size, image_size) uint8, not normalised, the output
    `logits` (N, num_classes) float32.

    Args:
        model: in evaluation mode, on the host.
        int8: weights as bytes and activations quantised as they come ("dynamically"), by ONNX
            Runtime; far from torch's by design.

    Raises:
        RequestError: the network cannot be written as ONNX, or would compute something else.
    """
    shape_NCHW = (_NUM_TRIED, 3, image_size, image_size)
    generator = torch.Generator().manual_seed(0)
    images_NCHW = torch.randint(0, 256, shape_NCHW, dtype=torch.uint8, generator=generator)
    with _silenced():
        try:
            # By itself the exporter would fall back to recording one forward pass, and so to
            # whatever way that took through a model that decides by what it computes.
            program = torch.export.export(
                model, (images_NCHW[:2],), dynamic_shapes=({0: torch.export.Dim("batch")},)
            )
            torch.onnx.export(
                program, (), str(path), dynamo=True, external_data=False, verbose=False,
                input_names=["images"], output_names=["logits"],
            )  # fmt: skip
        except Exception as error:
            # The exporter's own classes are many, and their messages pages long.
            why = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise RequestError(f"the network cannot be written as ONNX: {why}") from error
        if int8:
            _quantise(path)
        apart = _apart(model, path, images_NCHW)
    if not int8 and not apart <= _TOLERANCE:
        raise RequestError(f"ONNX Runtime's logits are {apart:.1e} of the largest from torch's")
    return apart


def _quantise(path: Path) -> None:
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    whole = onnx.load(str(path))
    # Shapes that torch wrote down, of weights that the quantiser transposes.
    del whole.graph.value_info[:]
    # Unsigned: the only convolutions of integers that ONNX Runtime has on a CPU.
    quantize_dynamic(whole, str(path), weight_type=QuantType.QUInt8)


class Network(nn.Module):
    """What ONNX Runtime reads in a file that `write` wrote, as a model."""

    def __init__(self, path: Path) -> None:
        import onnxruntime

        super().__init__()
        providers = ["CPUExecutionProvider"]
        self.session = onnxruntime.InferenceSession(str(path), providers=providers)

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        """uint8 (N, 3, image_size, image_size) to float32 (N, num_classes)."""
        (logits,) = self.session.run(None, {"images": images_NCHW.contiguous().numpy()})
        return torch.from_numpy(logits)


def _apart(model: nn.Module, path: Path, images_NCHW: torch.Tensor) -> float:
    with torch.no_grad():
        expected = model(images_NCHW)
    apart = float((Network(path)(images_NCHW) - expected).abs().max())
    return apart / (float(expected.abs().max()) or 1.0)


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Keep exporter and quantiser from warning of what is looked at here."""
    with warnings.catch_warnings(), open(os.devnull, "w") as nowhere:
        warnings.simplefilter("ignore")
        logging.disable(logging.ERROR)
        try:
            with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
                yield
        finally:
            logging.disable(logging.NOTSET)
