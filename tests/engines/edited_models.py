"""A model whose code is edited between two starts that share a compile cache, in one engine.

    python -m tests.engines.edited_models ENGINE FOLDER

Each start is an engine of its own that finds what the one before left on disk. Prints one line of
JSON: edit -> the losses of its steps, those in plain torch, and whether it took anything from
the cache.
"""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from tests.engines.beside_torch import StepsBesideTorch

NUM_STEPS = 3
HELPER = """
RATE = 1.0
RATES = [1.0, 2.0]

def helped(x, power=1.0):
    return x * RATE * RATES[1] * power
"""
MODEL = """
import torch
from torch import nn
from torch.nn import functional
from edited import helper

def scaling(rate):
    return lambda x: x * rate

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.scaled = nn.Linear(16, 16), scaling(3.0)

    def forward(self, x):
        x = self.scaled(helper.helped(self.layer(x))).view(2, 8, 4, 4)
        x = functional.scaled_dot_product_attention(x, x, x)
        # Rounded to the type that numbers have where none is named.
        return (x.double() * torch.full((4,), 1 / 3)).float()
"""
# What one start after the other has: (which file, a text in it, what takes its place).
EDITS: dict[str, tuple[str, str, str]] = {
    "as it is": ("model", "", ""),
    "the same again": ("model", "", ""),
    "constant": ("helper", "RATE = 1.0", "RATE = 0.5"),
    "list": ("helper", "[1.0, 2.0]", "[1.0, 3.0]"),
    "default": ("helper", "power=1.0", "power=2.0"),
    "closure": ("model", "scaling(3.0)", "scaling(4.0)"),
    "operation": ("model", "self.layer(x)", "self.layer(x).relu()"),
    "type": ("model", "", ""),
    "kernels": ("model", "", ""),
}

# JAX has no numbers of 64 bits by default, and what torch has for attention is not asked there.
OF_ENGINE = {
    "inductor": ("as it is", "the same again", "constant", "closure", "type", "kernels"),
    "jax": tuple(edit for edit in EDITS if edit not in ("type", "kernels")),
}


def edited(folder: Path, edit: str) -> ModuleType:
    which, text, other = EDITS[edit]
    texts = {"helper": HELPER, "model": MODEL}
    texts[which] = texts[which].replace(text, other) if text else texts[which]
    (folder / "edited").mkdir(exist_ok=True)
    for name, content in texts.items():
        (folder / "edited" / f"{name}.py").write_text(content)
    importlib.invalidate_caches()
    for name in texts:
        # In the module that is there, which torch's compiler remembers by its name.
        module = sys.modules.get(f"edited.{name}")
        module = importlib.reload(module) if module else importlib.import_module(f"edited.{name}")
    return module


def losses(step: Callable[[Any, Any], Any]) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    batches = torch.randn(NUM_STEPS, 2, 8, 16, dtype=torch.float32, generator=generator)
    return [float(step(Spec, (batch,))) for batch in batches]


class Spec:
    @staticmethod
    def loss(net: nn.Module, batch: Any) -> torch.Tensor:
        return (net(batch[0]) - 1).square().mean()


def train(edit: str, engine_name: str, folder: Path) -> dict[str, Any]:
    torch.compiler.reset()
    torch.manual_seed(0)
    steps = StepsBesideTorch(engine_name, edited(folder, edit).Net().float(), lr=0.01)
    before = num_found(engine_name)
    return {
        "losses": losses(steps.engine_step), "plain": losses(steps.plain_step),
        "found": num_found(engine_name) - before,
    }  # fmt: skip


def num_found(engine_name: str) -> int:
    if engine_name == "jax":
        return KEPT["found"]
    from torch._dynamo.utils import counters

    return counters["aot_autograd"]["autograd_cache_hit"]


KEPT = {"found": 0}


def count_cached_steps() -> None:
    from accbench.engines.jax import step_cache

    plain = step_cache.StepCache.get

    def get(self: Any, key: str, arguments: Any, build: Callable[[], Any]) -> Any:
        built: list[Any] = []
        found = plain(self, key, arguments, lambda: built.append(None) or build())
        KEPT["found"] += not built
        return found

    step_cache.StepCache.get = get  # type: ignore[method-assign]


def main() -> None:
    engine_name, folder = sys.argv[1], Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True
    found = {}
    if engine_name == "jax":
        import accbench.engines.jax.runtime

        accbench.engines.jax.runtime.configure("cpu", "")
        count_cached_steps()
    for edit in OF_ENGINE[engine_name]:
        torch.set_default_dtype(torch.float64 if edit == "type" else torch.float32)
        torch.backends.cuda.enable_flash_sdp(edit != "kernels")
        found[edit] = train(edit, engine_name, folder)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
