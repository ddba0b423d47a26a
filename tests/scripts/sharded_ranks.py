"""A rank of four that train in every way to shard, beside training that shards nothing.

    python -m tests.scripts.sharded_ranks OUT [CASES|REPEATED|SOAKED [CASE ...]]

Rank 0 writes OUT/found.json: case -> relative distances of losses and of all updates together. With
CASES it has `refused` as well: flags -> what a rank is refused with.
"""

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from accbench import config, models, resolving
from accbench.config import plugins
from accbench.distributed import process_group
from accbench.distributed.process_group import Topology
from accbench.distributed.whole_tensors import is_sharded
from accbench.errors import RequestError
from accbench.training import worker
from accbench.training.label_counts import LabelCounts
from accbench.training.train_loop import train_step

STEPS, BATCH = 5, 8
FLAGS = ("--device=cpu", "--amp_level=O0", "--threads=1", "--data=synthetic", "--seq_len=16",
         "--image_size=16")  # fmt: skip
SGD, ADAMW = ("--optimizer=sgd", "--lr=0.1"), ("--optimizer=adamw", "--lr=1e-3")
UNTIED, TIED = "--model=llama_tiny", "--model=gpt2_tiny"
HEADS = "--model=tests.nets:many_heads"
SLOPES = "--model=tests.distributed.decoders:with_summed_slopes"
BATCHNORM = "--model=tests.nets:sevenths"
Case = tuple[tuple[str, ...], tuple[str, ...], str]
ZERO_1, ZERO_2, ZERO_3 = (("--dp_shard=auto", f"--zero={stage}") for stage in (1, 2, 3))
SGD_CLIPPED, ADAMW_TIED = (UNTIED, *SGD, "--clip_norm=0.5"), (TIED, *ADAMW)
FLOAT16 = (UNTIED, *ADAMW, "--amp_level=O1", "--amp_dtype=float16")
CASES: dict[str, Case] = {
    "zero 1 sgd": (SGD_CLIPPED, ZERO_1, "whole"),
    "zero 2 sgd": (SGD_CLIPPED, ZERO_2, "whole"),
    "zero 3 sgd": (SGD_CLIPPED, ZERO_3, "whole"),
    "zero 1 adamw": (ADAMW_TIED, ZERO_1, "whole"),
    "zero 3 adamw": (ADAMW_TIED, ("--dp_shard=4",), "whole"),
    "zero 1 batchnorm": ((BATCHNORM, *SGD), ZERO_1, "ddp"),
    "zero 3 batchnorm": ((BATCHNORM, *SGD), ZERO_3, "ddp"),
    "zero 1 overflow": (FLOAT16, ZERO_1, "ddp"),
    "zero 3 overflow": (FLOAT16, ZERO_3, "ddp"),
    "2 x 2 zero 1": (SGD_CLIPPED, ("--dp_shard=2", "--zero=1"), "whole"),
    "2 x 2 zero 3": (SGD_CLIPPED, ("--dp_shard=2", "--zero=3"), "whole"),
    "2 x 2 skipped": ((UNTIED, *SGD, "--on_nan=skip"), ("--dp_shard=2",), "ddp"),
    "zero 1 accumulated": ((TIED, *SGD, "--accumulate=2"), ZERO_1, "whole"),
    "zero 3 accumulated": ((TIED, *SGD, "--accumulate=2"), ZERO_3, "whole"),
    "zero 3 dropout": ((TIED, *SGD), ZERO_3, "ddp"),
    "tp sgd": (SGD_CLIPPED, ("--tp=2",), "whole"),
    "tp adamw": (ADAMW_TIED, ("--tp=2",), "whole"),
    "tp 2 x 2 zero 3": (SGD_CLIPPED, ("--tp=2", "--dp_shard=auto"), "whole"),
    "tp 2 x 2 zero 1": (
        (TIED, *SGD, "--clip_norm=0.5"),
        ("--tp=2", "--dp_shard=2", "--zero=1"),
        "whole",
    ),
    "tp 2 x 2 adamw": (ADAMW_TIED, ("--tp=2", "--dp_shard=2"), "whole"),
    "tp bert": (("--model=bert_tiny", *SGD), ("--tp=2",), "whole"),
    "tp vit": (("--model=tests.nets:small_vit", *SGD), ("--tp=2",), "whole"),
    "tp overflow": (FLOAT16, ("--tp=2",), "ddp"),
    "tp accumulated": ((TIED, *SGD, "--accumulate=2"), ("--tp=2", "--dp_shard=2"), "whole"),
}
CASES |= {
    "cp sgd": (SGD_CLIPPED, ("--cp=2",), "whole"),
    "cp adamw": (ADAMW_TIED, ("--cp=2", "--dp_shard=2"), "whole"),
    "cp 2 x tp 2": ((HEADS, *SGD, "--accumulate=2"), ("--cp=2", "--tp=2"), "whole"),
}
TWICE = "--accumulate=2"
CASES |= {
    "ignored labels": (SGD_CLIPPED, (), "whole"),
    "ignored labels accumulated": (SGD_CLIPPED, (TWICE,), "whole"),
    "ignored labels 2 x 2 zero 3": (SGD_CLIPPED, ("--tp=2", "--dp_shard=auto"), "whole"),
    "ignored labels cp": (SGD_CLIPPED, ("--cp=2", TWICE), "whole"),
    "ignored labels pp": (SGD_CLIPPED, ("--pp=2", TWICE), "whole"),
}
RING = "--cp_attention=ring"
# Llama's two heads of keys are fewer than the ranks.
CASES |= {
    "cp 4 ring sgd": (SGD_CLIPPED, ("--cp=4", RING), "whole"),
    "cp ring adamw": (ADAMW_TIED, ("--cp=2", RING, "--dp_shard=2"), "whole"),
    "cp 4 ring ignored labels": (SGD_CLIPPED, ("--cp=4", RING), "whole"),
    "cp 2 ring x tp 2": (
        (UNTIED, *SGD, "--accumulate=2", "--checkpoint_modules=LlamaDecoderLayer"),
        ("--cp=2", RING, "--tp=2"),
        "whole",
    ),
}
TP_PARTS = ("--tp=2", "--sequence_parallel")
CASES |= {
    "sequence sgd": (SGD_CLIPPED, TP_PARTS, "whole"),
    "sequence adamw": ((UNTIED, *ADAMW, "--clip_norm=0.5"), TP_PARTS, "whole"),
    "sequence tied adamw": (ADAMW_TIED, TP_PARTS, "whole"),
    "sequence bert": (("--model=bert_tiny", *SGD), TP_PARTS, "whole"),
    "sequence vit": (("--model=tests.nets:even_vit", *SGD, "--image_size=24"), TP_PARTS, "whole"),
    "sequence 2 x 2 zero 3": (SGD_CLIPPED, (*TP_PARTS, "--dp_shard=auto"), "whole"),
    "sequence 2 x 2 zero 1": (
        (TIED, *SGD, "--accumulate=2"),
        (*TP_PARTS, "--dp_shard=2", "--zero=1", "--checkpoint_modules=GPT2Block"),
        "whole",
    ),
    "sequence cp 2 x tp 2": (
        (HEADS, *SGD, "--accumulate=2"), (*TP_PARTS, "--cp=2"), "whole"
    ),
    "sequence dropout": ((TIED, *SGD), TP_PARTS, "--tp=2"),
    "sequence summed 2 x 2 zero 3": (
        (SLOPES, *SGD, "--clip_norm=0.5"), (*TP_PARTS, "--dp_shard=auto"), "whole"
    ),
}  # fmt: skip
OFFLOADED = "--offload=optimizer"
CASES |= {
    "offload optimizer": (SGD_CLIPPED, (OFFLOADED,), "whole"),
    "offload optimizer zero 1 overflow": (FLOAT16, (OFFLOADED, *ZERO_1), "ddp"),
    "offload optimizer zero 3": (ADAMW_TIED, (OFFLOADED, *ZERO_3), "whole"),
    "offload all": (SGD_CLIPPED, ("--offload=all", *ZERO_3), "whole"),
    "offload all tp 2 x 2": (ADAMW_TIED, ("--offload=all", "--tp=2", "--dp_shard=auto"), "whole"),
}
FACES, PARTIAL = "--model=tests.nets:TinyFace", "--model=tests.nets:PartialFace"
CASES |= {
    "partial fc sgd": ((FACES, *SGD, "--clip_norm=0.5"), (PARTIAL,), "whole"),
    "partial fc uneven adamw": ((FACES, *ADAMW), (PARTIAL,), "whole"),
}
ENDS = {
    name: (f"--model=tests.nets:{name}", *SGD)
    for name in ("large_ends", "tied_ends", "read_ends", "embedding_as_head", "ends_in_turns")
}
IN_CHUNKS = ("--model=tests.nets:ends_in_chunks", *SGD)
LARGE_ENDS = "--model=tests.nets:large_ends"
CASES |= {
    "ends zero 2": ((*ENDS["ends_in_turns"], TWICE), ZERO_2, "whole"),
    "ends zero 3": (ENDS["large_ends"], ZERO_3, "whole"),
    "ends tied": (ENDS["tied_ends"], ZERO_3, "whole"),
    "ends read": ((*ENDS["read_ends"], TWICE), ZERO_3, "whole"),
    "ends as one": (ENDS["embedding_as_head"], ZERO_3, "whole"),
    "ends in turns": (ENDS["ends_in_turns"], ZERO_3, "whole"),
    "ends in chunks": (IN_CHUNKS, ZERO_3, "whole"),
    "ends 2 x 2 zero 3": ((*ENDS["ends_in_turns"], "--clip_norm=0.5"), ("--dp_shard=2",), "whole"),
    "ends offload all": (ENDS["ends_in_turns"], ("--offload=all", *ZERO_3), "whole"),
    "ends tp 2 x 2 adamw": (
        (LARGE_ENDS, *ADAMW, "--checkpoint_modules=_Residual"),
        ("--tp=2", "--dp_shard=auto"),
        "whole",
    ),
}
DEEP, DEEP_TIED = "--model=tests.nets:four_layers", "--model=tests.nets:four_tied_layers"
DEEP_CLIPPED = (DEEP, *SGD, "--clip_norm=0.5")
STAGED = ("--model=tests.nets:staged", *SGD)
INTERLEAVED, GPIPE = "--pp_schedule=interleaved", "--pp_schedule=gpipe"
CASES |= {
    "pp 4 sgd": ((*DEEP_CLIPPED, "--accumulate=4"), ("--pp=4",), "whole"),
    "pp 2 tied adamw": (
        (DEEP_TIED, *ADAMW, "--clip_norm=0.5", "--accumulate=2"),
        ("--pp=2",),
        "whole",
    ),
    "pp 2 interleaved": ((*DEEP_CLIPPED, "--accumulate=4"), ("--pp=2", INTERLEAVED), "whole"),
    "pp 4 batchnorm": ((*STAGED, "--accumulate=4"), ("--pp=4", GPIPE), "whole"),
    "pp 2 x 2 zero 1": (
        (DEEP_TIED, *SGD, "--accumulate=2"),
        ("--pp=2", *ZERO_1),
        "whole",
    ),
}
INDUCTOR, VIT = "--engine=inductor", ("--model=tests.nets:small_vit", *SGD)
CASES["inductor tp 2 x 2"] = (SGD_CLIPPED, (INDUCTOR, "--tp=2", "--dp_shard=2"), "whole")
# Of one layer, as it compiles.
CASES["inductor sequence 2 x 2"] = (
    (HEADS, *SGD, "--clip_norm=0.5"), (INDUCTOR, *TP_PARTS, "--dp_shard=2"), "whole"
)  # fmt: skip
"""Case -> flags of both, flags of the sharded run, and what it is held against."""
# They compile for a minute each.
SOAKED: dict[str, Case] = {
    "inductor tp": (ADAMW_TIED, (INDUCTOR, "--tp=2"), "whole"),
    "inductor summed": ((SLOPES, *SGD), (INDUCTOR, "--tp=2"), "whole"),
    "inductor sequence dropout": ((TIED, *SGD), (INDUCTOR, *TP_PARTS), f"--tp=2 {INDUCTOR}"),
    "pp 2 x tp 2 sequence": (
        (*DEEP_CLIPPED, "--accumulate=2"), ("--pp=2", *TP_PARTS), "whole"
    ),
    "pp 2 x tp 2": ((*DEEP_CLIPPED, "--accumulate=2"), ("--pp=2", "--tp=2"), "whole"),
    "pp 2 x cp 2": ((*DEEP_CLIPPED, "--accumulate=2"), ("--pp=2", "--cp=2"), "whole"),
    "inductor ignored labels": (SGD_CLIPPED, (INDUCTOR, TWICE), "whole"),
    "pp 2 x cp 2 ring": ((*DEEP_CLIPPED, "--accumulate=2"), ("--pp=2", "--cp=2", RING), "whole"),
    "inductor cp 2 ring": (SGD_CLIPPED, (INDUCTOR, "--cp=2", RING, "--dp_shard=2"), "whole"),
    "pp skipped": ((*DEEP_CLIPPED, "--accumulate=2", "--on_nan=skip"), ("--pp=2",), "ddp"),
    "pp bert": (("--model=bert_tiny", *SGD), ("--pp=2", TWICE), "whole"),
    "pp vit": ((*VIT, "--accumulate=2"), ("--pp=2",), "whole"),
    "inductor pp 2": ((*DEEP_CLIPPED, "--accumulate=2"), (INDUCTOR, "--pp=2"), "whole"),
    "inductor zero 1": (ADAMW_TIED, (INDUCTOR, *ZERO_1), "whole"),
    "inductor zero 3": (SGD_CLIPPED, (INDUCTOR, *ZERO_3), "whole"),
    "partial fc offload": ((FACES, *ADAMW), (PARTIAL, OFFLOADED), "whole"),
    "partial fc accumulated": ((FACES, *SGD, "--accumulate=2"), (PARTIAL,), "whole"),
    "inductor partial fc": ((FACES, *SGD), (PARTIAL, INDUCTOR), "whole"),
    "inductor ends": (ENDS["ends_in_turns"], (INDUCTOR, *ZERO_3), "whole"),
    "inductor offload all": (SGD_CLIPPED, (INDUCTOR, "--offload=all", *ZERO_3), "whole"),
    "inductor offload optimizer": (ADAMW_TIED, (INDUCTOR, OFFLOADED), "whole"),
    "offload optimizer tp": (ADAMW_TIED, (OFFLOADED, "--tp=2"), "whole"),
    "offload optimizer cp": (SGD_CLIPPED, (OFFLOADED, "--cp=2", "--dp_shard=2"), "whole"),
    "offload optimizer zero 2": (
        (TIED, *SGD, "--accumulate=2"), (OFFLOADED, "--dp_shard=2", "--zero=2"), "whole"
    ),
    "offload optimizer batchnorm": ((BATCHNORM, *SGD), (OFFLOADED, *ZERO_1), "ddp"),
    "offload optimizer skipped": (
        (UNTIED, *SGD, "--on_nan=skip"), (OFFLOADED, "--dp_shard=2"), "ddp"
    ),
    "offload all 2 x 2": (
        (TIED, *SGD, "--accumulate=2"), ("--offload=all", "--dp_shard=2"), "whole"
    ),
    "offload all overflow": (FLOAT16, ("--offload=all", *ZERO_3), "ddp"),
    "offload all dropout": ((TIED, *SGD), ("--offload=all", *ZERO_3), "ddp"),
}  # fmt: skip
if find_spec("jax"):
    JAX = ("--engine=jax", "--tp=2")
    LATE = ("--engine=jax", "--dp_shard=auto", "--jax.gather=layers")
    CASES["jax tp 2 x 2"] = (SGD_CLIPPED, (*LATE, "--tp=2"), "whole")
    CASES["jax ignored labels"] = (SGD_CLIPPED, ("--engine=jax", TWICE), "whole")
    CASES["jax sequence 2 x 2"] = (SGD_CLIPPED, (*LATE, *TP_PARTS), "whole")
    CASES["jax ignored labels sequence 2 x 2"] = (
        (HEADS, *SGD, "--clip_norm=0.5"), (*LATE, *TP_PARTS), "whole"
    )  # fmt: skip
    CASES["jax cp 4 ring"] = (SGD_CLIPPED, ("--engine=jax", "--cp=4", RING), "whole")
    CASES["jax cp 2 ring x tp 2"] = (
        (HEADS, *SGD, TWICE, "--checkpoint_modules=LlamaDecoderLayer"),
        (*JAX, "--cp=2", RING),
        "whole",
    )
    SOAKED |= {
        "jax tp": (SGD_CLIPPED, JAX, "whole"),
        "jax late": ((TIED, *SGD, "--accumulate=2"), LATE, "whole"),
        "jax late adamw": ((UNTIED, *ADAMW), LATE, "whole"),
        "jax cp": (SGD_CLIPPED, ("--engine=jax", "--cp=2", "--dp_shard=auto"), "whole"),
        "jax cp 2 ring late": (
            (UNTIED, *SGD, TWICE, "--checkpoint_modules=LlamaDecoderLayer"),
            (*LATE, "--cp=2", RING),
            "whole",
        ),
        "jax cp ring adamw": (
            ADAMW_TIED,
            ("--engine=jax", "--cp=2", RING, "--dp_shard=auto"),
            "whole",
        ),
        "jax cp 2 x tp 2": ((HEADS, *ADAMW), (*JAX, "--cp=2"), "whole"),
        "inductor cp 2 x tp 2": ((HEADS, *SGD), (INDUCTOR, "--tp=2", "--cp=2"), "whole"),
        "jax tp adamw": (ADAMW_TIED, JAX, "whole"),
        "jax tp 2 x 2 adamw": (ADAMW_TIED, (*JAX, "--dp_shard=auto"), "whole"),
        "jax tp vit": (VIT, JAX, "whole"),
        "jax summed": ((SLOPES, *SGD, "--clip_norm=0.5"), JAX, "whole"),
    }
# Case -> one of the others that goes through the same code; `make soak` has these.
_REPEATS = {
    "zero 1 sgd": "2 x 2 zero 1", "zero 1 adamw": "offload optimizer zero 1 overflow",
    "zero 2 sgd": "ends zero 2", "zero 3 sgd": "ends 2 x 2 zero 3", "zero 3 adamw": "cp adamw",
    "zero 1 overflow": "offload optimizer zero 1 overflow", "zero 3 overflow": "2 x 2 skipped",
    "2 x 2 zero 3": "ends 2 x 2 zero 3", "zero 1 accumulated": "sequence 2 x 2 zero 1",
    "zero 3 accumulated": "ends read", "tp adamw": "tp 2 x 2 zero 1",
    "tp 2 x 2 zero 3": "ignored labels 2 x 2 zero 3", "tp 2 x 2 adamw": "offload all tp 2 x 2",
    "tp bert": "sequence bert", "tp vit": "sequence vit",
    "tp overflow": "offload optimizer zero 1 overflow", "tp accumulated": "ends read",
    "cp sgd": "ignored labels cp", "cp 2 x tp 2": "sequence cp 2 x tp 2",
    "ignored labels": "ignored labels 2 x 2 zero 3",
    "ignored labels accumulated": "ignored labels cp",
    "cp 4 ring sgd": "cp 4 ring ignored labels", "cp ring adamw": "cp adamw",
    "sequence adamw": "sequence sgd", "sequence tied adamw": "sequence 2 x 2 zero 1",
    "offload optimizer": "offload optimizer zero 3", "offload all": "offload all tp 2 x 2",
    "partial fc uneven adamw": "partial fc sgd", "ends in turns": "ends 2 x 2 zero 3",
    "ends offload all": "offload all tp 2 x 2", "pp 4 sgd": "pp 4 batchnorm",
    "inductor tp 2 x 2": "inductor sequence 2 x 2",
    "jax tp 2 x 2": "jax ignored labels sequence 2 x 2",
    "jax ignored labels": "jax ignored labels sequence 2 x 2",
    "jax sequence 2 x 2": "jax ignored labels sequence 2 x 2",
    "jax cp 4 ring": "jax cp 2 ring x tp 2",
}  # fmt: skip
REPEATED = {case: CASES.pop(case) for case in _REPEATS if case in CASES}

# Flags -> what a rank is refused with when it has the model.
REFUSED = {
    ("--sequence_parallel", "--tp=2", "--model=tests.nets:small_vit"): "--model "
    "tests.nets:small_vit has no plan for --sequence_parallel; leave it out, or give the network "
    "a sequence_parallel_plan (docs/parallel.md)",
    ("--cp=2", "--model=tests.nets:tiny"): "--cp 2: --model tests.nets:tiny has no sequences to "
    "cut; leave --cp out",
    ("--cp=2", "--model=bert_tiny"): "--cp 2: --model bert_tiny needs whole sequences; leave --cp "
    "out",
    ("--cp=4", "--model=llama_tiny"): "--cp 4: --model llama_tiny has 2 num_key_value_heads; use "
    "a divisor of them, or --cp_attention ring",
    ("--cp=2", "--tp=2", "--model=llama_tiny"): "--cp 2: --model llama_tiny has 2 "
    "num_key_value_heads, 1 with --tp 2; use a divisor of them, or --cp_attention ring",
    ("--cp=2", RING, "--model=gpt2_tiny"): "--cp 2 --cp_attention ring: --model gpt2_tiny drops "
    "attention's weights with probability 0.1, which the ring cannot; use --cp_attention ulysses",
    ("--cp=2", RING, "--model=llama_tiny", "--seq_len=18"): "--cp 2 --cp_attention ring: "
    "--seq_len 18 is no multiple of 4",
    ("--tp=4", "--model=llama_tiny"): "--tp 4: model.layers.0.self_attn.k_proj has 2 heads; use "
    "--tp 1 or 2",
}


MEASURED = ("tp sgd", "sequence sgd", "tp adamw", "sequence tied adamw")
KEPT = ("applied", "scale", "bytes", "rereads", "starts", "deferred", "names", "score", "whole")


def train(flags: tuple[str, ...], topology: Topology, case: str) -> dict[str, Any]:
    """Losses of five steps, parameters and buffers before and after, and what was kept.

    A topology of one rank is for one process, for which the others may wait: it talks to none.
    """
    task = resolving.resolve(config.parse([*FLAGS, *flags, f"--batch_size={BATCH}"]))
    engine = plugins.load("engines", task.engine)(task, task.options[task.engine], topology)
    engine.strategy.prove()
    spec = models.of_task(task)
    built = []
    num_classes = 63 if "uneven" in case else 64

    def build() -> nn.Module:
        net = spec.build(num_classes)
        for module in net.modules():
            if isinstance(module, nn.Dropout) and "dropout" not in case:
                module.p = 0.0
        built.append(next(net.parameters()))
        return net

    torch.manual_seed(task.seed)
    whole = build()
    names = sorted({n for n, _ in (*whole.named_parameters(), *whole.named_buffers())})
    before = {name: tensor.detach().clone() for name, tensor in whole.named_parameters()}
    is_alone = topology.world_size == 1
    if is_alone:
        torch.manual_seed(task.seed)
        net = build()
        model = engine.prepared(net)
    else:
        net, model = worker.build_model(engine, build)
    optimizer = engine.build_optimizer(model)
    start = engine.training_state(net, optimizer).model
    data = engine.mesh.data_topology(topology)
    transform = worker.share_sequences(engine, spec, net)
    engine.seed(data.rank)
    losses = []
    loader = Batches()
    for step in range(STEPS):
        batch = spec.synthetic_batch(BATCH, num_classes, torch.Generator().manual_seed(step))
        if "ignored" in case:
            ignore_some(batch["labels"], step)
        loader.append(transform(part(batch, data)))
    labels = LabelCounts(engine, spec, SimpleNamespace(ignores_labels="ignored" in case))
    for step, batch in enumerate(labels.device_batches(loader)):
        if step == 2 and ("overflow" in case or "skipped" in case):
            plant_infinity(engine, topology)
        loss = engine.run_step(train_step, model, spec, optimizer, batch).detach()
        losses.append(loss.item() if is_alone else mean_over_ranks(loss.item()))
    state = engine.training_state(net, optimizer)
    found = {
        "losses": losses, "before": before, "after": state.model,
        "starts": all(torch.equal(start[name], tensor) for name, tensor in before.items()),
        "deferred": isinstance(built[-1], FakeTensor), "names": sorted(start) == names,
        "applied": engine.applied_steps(optimizer), "scale": engine.precision.loss_scale(),
        "score": None, "whole": None,
    }  # fmt: skip
    if "ends" in case:
        batch = spec.synthetic_batch(BATCH, num_classes, torch.Generator().manual_seed(STEPS))
        with torch.no_grad():
            found["score"] = engine.run_score(model, spec, batch).tolist()
        found["whole"] = whole_between_passes(net, model, spec, batch)
    again = {name: tensor * 2 for name, tensor in state.model.items()}
    engine.load_training_state(net, optimizer, type(state)(again, state.optimizer, {}, state.extra))
    reread = engine.training_state(net, optimizer)
    found["rereads"] = all(torch.equal(again[n], t) for n, t in reread.model.items()) and all(
        torch.equal(t, reread.optimizer[n][k])
        for n, s in state.optimizer.items()
        for k, t in s.items()
    )
    kept = [t for s in optimizer.state.values() for t in s.values() if t.dim()]
    kept += [p for group in optimizer.param_groups for p in group["params"]]
    found["bytes"] = sum(t.numel() * t.element_size() for t in kept)
    found["passes"] = measured_passes(model, spec, loader[-1]) if case in MEASURED else None
    return found


def mean_over_ranks(value: float) -> float:
    values = [of_rank for (of_rank,) in process_group.all_gather_values([value])]
    return sum(values) / len(values)


def refusal(flags: tuple[str, ...], topology: Topology) -> str | None:
    """What a worker is refused with while it builds its model; None if it is not."""
    task = resolving.resolve(config.parse([*FLAGS, *flags, f"--batch_size={BATCH}"]))
    try:
        engine = plugins.load("engines", task.engine)(task, task.options[task.engine], topology)
        spec = models.of_task(task)
        net, _ = worker.build_model(engine, lambda: spec.build(64))
        worker.share_sequences(engine, spec, net)
    except RequestError as error:
        return str(error)
    return None


class Batches(list):
    """A loader of batches that it has."""

    resident = False


def ignore_some(labels_NT: torch.Tensor, step: int) -> None:
    """Ignore two labels more in each row than in the one before, and all of the last rank."""
    for row, labels_T in enumerate(labels_NT):
        labels_T[: 2 * row] = -1
    if step == 1:
        labels_NT[-BATCH // 4 :] = -1


class Collectives(TorchDispatchMode):
    """Counts torch's functional collectives by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = func.overloadpacket.__name__
        if func.namespace == "_c10d_functional" and kind != "wait_tensor":
            self.counts[kind] = self.counts.get(kind, 0) + 1
        return func(*args, **(kwargs or {}))


def measured_passes(model: nn.Module, spec: Any, batch: Any) -> dict[str, Any]:
    """Collectives of a forward and a backward pass, and bytes that are kept between them."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with Collectives() as collectives:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = spec.loss(model, batch)
        loss.backward()
    return {**collectives.counts, "saved_bytes": sum(kept.values())}


def whole_between_passes(net: nn.Module, model: nn.Module, spec: Any, batch: Any) -> list[str]:
    """Names of parameters that are whole between a forward and a backward pass."""
    loss = spec.loss(model, batch)
    whole = [name for name, parameter in net.named_parameters() if not is_sharded(parameter)]
    loss.backward()
    net.zero_grad()
    return whole


def part(batch: Any, data: Topology) -> Any:
    def cut(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(data.world_size)[data.rank]

    if isinstance(batch, dict):
        return {name: cut(tensor) for name, tensor in batch.items()}
    return tuple(map(cut, batch))


def plant_infinity(engine: Any, topology: Topology) -> None:
    """Have the last rank's own gradients alone overflow in the next step."""
    strategy, reduce = engine.strategy, engine.strategy.reduce_after_step

    def reduce_and_overflow(optimizer: torch.optim.Optimizer) -> None:
        reduce(optimizer)
        strategy.reduce_after_step = reduce
        # Of unsharded training all ranks have the same gradients.
        if topology.rank == topology.world_size - 1 or not strategy.shards:
            optimizer.param_groups[0]["params"][0].grad[0] = float("inf")

    strategy.reduce_after_step = reduce_and_overflow


def distances(found: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    pairs = zip(found["losses"], other["losses"], strict=True)
    moved = wanted = 0.0
    for name, before in other["before"].items():
        want = other["after"][name].double() - before
        moved += (found["after"][name].double() - before - want).square().sum().item()
        wanted += want.square().sum().item()
    buffers = other["after"].keys() & found["after"].keys() - other["before"].keys()
    wrong = [n for n in buffers if not torch.allclose(found["after"][n], other["after"][n], 1e-5)]
    return {
        "buffers": wrong,
        "losses": max(abs(a - b) / abs(b) for a, b in pairs),
        "updates": (moved / wanted) ** 0.5,
        "passes": found["passes"],
        **{key: [found[key], other[key]] for key in KEPT},
    }


def main(out: str, kind: str = "CASES", *chosen: str) -> None:
    topology = Topology.from_env()
    torch.set_num_threads(1)
    process_group.init_distributed(topology, "cpu", 600)
    found: dict[str, Any] = {}
    references: dict[Any, dict[str, Any]] = {}
    if kind == "CASES" and not chosen:
        found["refused"] = {" ".join(flags): refusal(flags, topology) for flags in REFUSED}
    for case, (flags, sharded, beside) in globals()[kind].items():
        if chosen and case not in chosen:
            continue
        key = (flags, beside, "overflow" in case, "ignored" in case, "uneven" in case)
        # Rank 0 alone looks at distances, and so trains what is not shared out, for all.
        is_here = beside != "whole" or topology.rank == 0
        if is_here and key not in references:
            alone = Topology() if beside == "whole" else topology
            unlike = beside.split() if beside.startswith("--") else []
            references[key] = train((*flags, *unlike), alone, case)
        trained = train((*flags, *sharded), topology, case)
        if topology.rank == 0:
            found[case] = distances(trained, references[key])
    if topology.rank == 0:
        Path(out, "found.json").write_text(json.dumps(found))
    if find_spec("jax"):
        from accbench.engines.jax import data_mesh

        data_mesh.shutdown_distributed()
    process_group.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
