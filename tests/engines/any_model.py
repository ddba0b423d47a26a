"""Models of many kinds, a few steps each, in one engine.

    python -m tests.engines.any_model ENGINE MODEL...

Prints one line of JSON: model -> how far weights and buffers are from those of the same training
in float64 by a plain loop, as a part of what they moved; or what was raised.
"""

import copy
import json
import sys

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from accbench import config, models, resolving
from accbench.config import plugins
from accbench.distributed.process_group import Topology
from accbench.engines.common import tied_parameters
from accbench.training.train_loop import train_step
from tests.engines.beside_torch import open_engine, resolved_task

NUM_STEPS, LR = 6, 1e-2
# A size in its graph depends on the batch's values, so that inductor compiles in each step.
FEWER_STEPS = {("inductor", "masks"): 2}
# torch_xla compiles each of them, so only what is special about them is left in.
MODELS = (
    "tied", "tied_deep", "tied_buffers", "shared_memory", "unused", "frozen_first", "cumulative",
    "returns_dict", "returns_tuple", "checkpointed", "checkpointed_reentrant", "masks",
    "computed_again", "tabled", "ranged",
)  # fmt: skip


def train(name: str, engine_name: str) -> dict:
    task = resolved_task(
        engine_name, f"--model=tests.nets:{name}", "--synthetic.num_classes=10", "--batch_size=4",
        "--image_size=16", "--amp_level=O0", f"--lr={LR}",
        *(("--checkpoint_modules=Sequential",) if name == "computed_again" else ()),
    )  # fmt: skip
    spec = models.of_task(task)
    generator = torch.Generator().manual_seed(1)
    num_steps = FEWER_STEPS.get((engine_name, name), NUM_STEPS)
    batches = [spec.synthetic_batch(4, 10, generator) for _ in range(num_steps)]
    torch.manual_seed(0)
    net = spec.build(10)
    start = {k: v.detach().double().clone() for k, v in tensors_of(net)}
    # First, for torch_xla's device has to be there before anything is differentiated.
    engine = open_engine(task)
    expected = reference(spec, net, batches)
    model = engine.prepared(net)
    optimizer = engine.build_optimizer(model)
    model.train()
    for batch in batches:
        engine.run_step(train_step, model, spec, optimizer, engine.to_device(batch))
    engine.wait()
    own = engine.training_state(net, optimizer).model
    assert own.keys() == expected.keys()
    away = {k: float((own[k].double() - expected[k]).norm()) for k in own}
    moved = {k: float((expected[k] - start[k]).norm()) for k in own}
    furthest = max(away, key=lambda k: away[k] / (moved[k] or 1.0))
    return {"away": away[furthest] / (moved[furthest] or 1.0), "furthest": furthest,
            "num_tensors": len(own), "left": engine.left_compiler()}  # fmt: skip


def tensors_of(net: nn.Module) -> list:
    return [*net.named_parameters(), *net.named_buffers()]


def reference(spec, net: nn.Module, batches) -> dict:
    """Weights and buffers after the steps, in float64."""
    net = copy.deepcopy(net)
    places = tied_parameters.find_ties(net)
    net = net.double()
    tied_parameters.restore_ties(places)
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR, weight_decay=1e-2)
    for batch in batches:
        optimizer.zero_grad()
        spec.loss(net, batch).backward()
        optimizer.step()
    return {name: tensor.detach().clone().double() for name, tensor in tensors_of(net)}


def masks_of_dropout() -> float:
    """Computed again in the backward pass, dropout must drop the same: gradient = out / weight."""
    engine = plugins.load("engines", "xla")
    task = resolving.resolve(
        config.parse(["--engine=xla", "--device=cpu", "--amp_level=O0", "--data=synthetic"])
    )
    made = engine(task, task.options["xla"], Topology())
    weight = torch.linspace(1, 2, 4096).to(made.device).requires_grad_()
    out = checkpoint(lambda w: torch.nn.functional.dropout(w * w, 0.5), weight, use_reentrant=False)
    out.sum().backward()
    made.end_step()
    dropped_forward = out.detach().cpu() == 0
    dropped_backward = weight.grad.cpu() == 0
    assert 0.4 < dropped_forward.float().mean() < 0.6
    return float((dropped_forward != dropped_backward).float().mean())


def main(engine: str, models: list[str]) -> None:
    found = {}
    for name in models:
        torch._dynamo.reset()  # all are of one class, of which it compiles eight
        try:
            found[name] = train(name, engine)
        except Exception as error:
            found[name] = {"raised": f"{type(error).__name__}: {error}"}
    if engine == "xla":
        found["masks of dropout"] = {"away": masks_of_dropout()}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
