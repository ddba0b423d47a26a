"""The models that a GPU's day measures, and their tiny forms for a rehearsal."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Model:
    """A model with its sizes."""

    name: str
    """As `--model` takes it."""
    batch_size: int
    size: tuple[str, ...]
    """The flags that give a sample's size."""


MODELS = {
    "rn50": Model("resnet50", 256, ("--image_size=224",)),
    "vit": Model("vit_b_16", 128, ("--image_size=224",)),
    "gpt2": Model("gpt2", 8, ("--seq_len=1024",)),
    "llama": Model("llama_1b", 4, ("--seq_len=1024",)),
}
TINY_MODELS = {
    "rn50": Model("resnet10", 4, ("--image_size=32",)),
    "vit": Model("benchmarks.nets:transformer", 4, ("--image_size=32",)),
    "gpt2": Model("gpt2_tiny", 2, ("--seq_len=32",)),
    "llama": Model("llama_tiny", 2, ("--seq_len=32",)),
}
# Without timing them, the compiler of 0.11.2 finds no tiling for some of its products.
PREFLIGHT_FLAGS = {"gpt2": ("--jax.flags=xla_gpu_enable_triton_gemm=false",)}
