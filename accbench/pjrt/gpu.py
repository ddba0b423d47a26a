"""Descriptions of GPUs: the target that XLA's compiler needs, and peak rates.

Each `accbench/pjrt/gpus/<name>.yaml` describes one; `--gpu FILE.yaml` names another.
"""

import dataclasses
import re
from pathlib import Path
from typing import Any

import yaml

from accbench.errors import RequestError

_FOLDER = Path(__file__).with_name("gpus")
# Element type of XLA -> keys of `dense_tflops` to look up, in this order.
_RATES = {
    "f16": ("float16",), "bf16": ("bfloat16", "float32"), "f32": ("tf32", "float32"),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class GpuSpec:
    """A GPU's data sheet; rates are peaks."""

    name: str
    """The name that the driver reports."""
    compute_capability: str
    """Such as 9.0."""
    multiprocessors: int
    clock_ghz: float
    """The highest clock rate."""
    memory_bytes: int
    memory_gb_per_s: float
    l2_bytes: int
    threads_per_multiprocessor: int
    float32_lanes_per_multiprocessor: int
    shared_bytes_per_multiprocessor: int
    shared_bytes_per_block: int
    """The most that a block can request."""
    dense_tflops: dict[str, float]
    """Element type of the factors (float16, bfloat16, tf32, float32) -> 10^12 operations/s."""
    in_node_gb_per_s: float = 32.0
    """Rate to the other GPUs of its node, one direction: NVLink's, or PCIe's (4.0 if unset)."""

    @property
    def bytes_per_s(self) -> float:
        """Memory bandwidth."""
        return self.memory_gb_per_s * 1e9

    def flops_per_s(self, element_type: str) -> float:
        """Return the peak rate that XLA may use for matrix products of its `element_type`."""
        for name in _RATES.get(element_type, ("float32",)):
            if name in self.dense_tflops:
                return self.dense_tflops[name] * 1e12
        return self.dense_tflops["float32"] * 1e12

    @property
    def target_config(self) -> str:
        """XLA's GpuTargetConfigProto as text (xla/stream_executor/device_description.proto)."""
        major, minor = self.compute_capability.split(".")
        device = {
            "threads_per_block_limit": 1024,
            "threads_per_warp": 32,
            "shared_memory_per_block": 49152,
            "shared_memory_per_core": self.shared_bytes_per_multiprocessor,
            "threads_per_core_limit": self.threads_per_multiprocessor,
            "core_count": self.multiprocessors,
            "fpus_per_core": self.float32_lanes_per_multiprocessor,
            "block_dim_limit_x": 2**31 - 1,
            "block_dim_limit_y": 65535,
            "block_dim_limit_z": 65535,
            "memory_bandwidth": int(self.bytes_per_s),
            "l2_cache_size": self.l2_bytes,
            "clock_rate_ghz": self.clock_ghz,
            "device_memory_size": self.memory_bytes,
            "shared_memory_per_block_optin": self.shared_bytes_per_block,
            "cuda_compute_capability": f"{{ major: {major} minor: {minor} }}",
            "registers_per_core_limit": 65536,
            "registers_per_block_limit": 65536,
        }
        facts = "\n".join(
            f"  {key}{'' if key.endswith('capability') else ':'} {value}"
            for key, value in device.items()
        )
        # cuDNN's version is the one that torch 2.8 ships.
        return (
            f'gpu_device_info {{\n{facts}\n}}\nplatform_name: "CUDA"\n'
            "dnn_version_info { major: 9 minor: 10 patch: 2 }\n"
            f"device_description_str: {_quoted(self.name)}\n"
        )


def _quoted(text: str) -> str:
    printable = re.sub(r'[^ -~]|["\\]', "?", text)
    return f'"{printable}"'


def names() -> list[str]:
    """Return the names of the GPUs that accbench describes."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def load(name: str) -> GpuSpec:
    """Load the GPU of a name, or of a YAML file.

    Raises:
        RequestError: the GPU is unknown, or the file does not describe one.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else _FOLDER / f"{name.lower()}.yaml"
    if not name.endswith((".yaml", ".yml")) and path.stem not in names():
        raise RequestError(
            f"unknown GPU {name!r}; there are: {', '.join(names())}, or a YAML file of the same "
            f"form as those in {_FOLDER}"
        )
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RequestError(f"--gpu {name}: {' '.join(str(error).split())}") from None
    return _parse_spec(content, f"--gpu {name}")


def _parse_spec(content: Any, what: str) -> GpuSpec:
    fields = {field.name: field.type for field in dataclasses.fields(GpuSpec)}
    if not isinstance(content, dict):
        raise RequestError(f"{what}: not a mapping of {', '.join(fields)}")
    needed = {f.name for f in dataclasses.fields(GpuSpec) if f.default is dataclasses.MISSING}
    for problem, keys in (
        ("lacks", needed - set(content)), ("has unknown", set(content) - set(fields)),
    ):  # fmt: skip
        if keys:
            raise RequestError(f"{what} {problem} {', '.join(sorted(map(str, keys)))}")
    if not isinstance(content["name"], str):
        raise RequestError(f"{what}: name must be text, not {content['name']!r}")
    if not re.fullmatch(r"\d+\.\d", str(content["compute_capability"])):
        raise RequestError(
            f'{what}: compute_capability must be as "9.0", not {content["compute_capability"]!r}'
        )
    rates = content["dense_tflops"]
    if not isinstance(rates, dict) or "float32" not in rates:
        raise RequestError(f"{what}: dense_tflops must be a mapping with float32 in it")
    numbers = {key: content[key] for key in content if fields[key] in (int, float)}
    for key, number in {**numbers, **{f"dense_tflops.{k}": v for k, v in rates.items()}}.items():
        is_int = fields.get(key) is int
        is_valid = isinstance(number, int if is_int else (int, float))
        if not is_valid or isinstance(number, bool) or not 0 < number < 1e15:
            raise RequestError(
                f"{what}: {key} must be a {'whole ' if is_int else ''}number above 0, "
                f"not {number!r}"
            )
    return GpuSpec(**{**content, "compute_capability": str(content["compute_capability"])})


def dense_tflops_of(device_name: str, dtype: str | None) -> float | None:
    """Return a GPU's peak rate of matrix products in 10^12 operations/s, or None if unknown.

    Args:
        device_name: the name that the driver reports.
        dtype: of autocast; None is float32, which has no single peak, because torch computes some
            float32 products in tf32.
    """
    for path in _FOLDER.glob("*.yaml"):
        known = load(path.stem)
        if known.name == device_name:
            return known.dense_tflops.get(dtype or "")
    return None
