"""Pipelines: how plans cut models into stages, what is refused, and evaluation."""

import copy

import pytest
import torch
from torch import nn

from accbench import config, launchers
from accbench.data import mock_images
from accbench.engines.common import pipeline_stages
from accbench.errors import RequestError
from accbench.recording import records
from tests.conftest import TINY, of_kind, run
from tests.engine_params import NEEDS_XLA

CPU = torch.device("cpu")


class Block(nn.Module):
    """Takes its input by any name, with a tensor for all blocks, and may return a tuple."""

    def __init__(self, in_tuples: bool) -> None:
        super().__init__()
        self.layer, self.in_tuples = nn.Linear(4, 4), in_tuples
        self.buffer: torch.Tensor
        self.register_buffer("buffer", torch.ones(4))

    def forward(self, hidden: torch.Tensor, scale: torch.Tensor) -> torch.Tensor | tuple:
        out = self.layer(hidden).tanh() * scale * self.buffer
        return (out, None) if self.in_tuples else out


class Net(nn.Module):
    """An embedding that is tied to the head, and four blocks."""

    def __init__(self, in_tuples: bool = False, by_name: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(6, 4)
        self.blocks = nn.ModuleList(Block(in_tuples) for _ in range(4))
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.words.weight
        self.in_tuples, self.by_name, self.num_passes = in_tuples, by_name, 1
        self.scale = torch.tensor(1.5)
        self.pipeline_plan = ["words", "blocks.*", "head"]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.words(tokens)
        for _ in range(self.num_passes):
            for index in range(len(self.blocks)):
                block = self.blocks[index]
                out = (
                    block(hidden=hidden, scale=self.scale)
                    if self.by_name
                    else block(hidden, self.scale)
                )
                hidden = out[0] if self.in_tuples else out
        return self.head(hidden)


def cut(net: nn.Module, own: list[int], num_stages: int) -> pipeline_stages.StagedModel:
    return pipeline_stages.cut(net, "net", num_stages, own, CPU)


@pytest.mark.parametrize("form", [{}, {"in_tuples": True}, {"by_name": True}])
def test_stages_one_after_the_other_are_the_model(form):
    net, tokens = Net(**form), torch.arange(6)
    expected = net(tokens)
    expected.square().sum().backward()
    hidden, inputs = None, []
    parts = [copy.deepcopy(net) for _ in range(3)]
    for stage, part in enumerate(parts):
        part.zero_grad()
        staged = cut(part, [stage], 3)
        received = None if hidden is None else hidden.detach().requires_grad_()
        inputs.append((received, hidden))
        hidden = staged.run.compute(stage, received, lambda net=part: net(tokens))
    assert torch.equal(hidden, expected)
    hidden.square().sum().backward()
    for received, sent in reversed(inputs[1:]):
        sent.backward(received.grad)
    for name, parameter in net.named_parameters():
        gradients = [dict(part.named_parameters()).get(name) for part in parts]
        total = sum(part.grad for part in gradients if part is not None)
        assert torch.allclose(total, parameter.grad), name


def test_a_rank_keeps_its_own_parameters_by_their_names():
    net = Net()
    whole = dict(net.named_parameters())
    middle, last = copy.deepcopy(net), copy.deepcopy(net)
    staged = cut(middle, [1], 4)
    cut(last, [3], 4)
    assert {*dict(middle.named_parameters())} == {"blocks.1.layer.weight", "blocks.1.layer.bias"}
    assert {*dict(middle.named_buffers())} == {"blocks.1.buffer"}
    assert middle.words.weight.untyped_storage().nbytes() == 4
    assert {*dict(last.named_parameters())} == {
        "words.weight", "blocks.3.layer.weight", "blocks.3.layer.bias"
    }  # fmt: skip
    assert last.head.weight is last.words.weight
    assert torch.equal(last.words.weight, whole["words.weight"])
    assert staged.shared == {"words.weight": (0, 3)}
    assert staged.owners == {
        "words.weight": 0,
        **{f"blocks.{n}.{key}": n for n in range(4)
           for key in ("layer.weight", "layer.bias", "buffer")},
    }  # fmt: skip
    with pytest.raises(RequestError, match="a block is called outside of its stage"):
        middle(torch.arange(6))


def test_a_worker_may_have_several_stages():
    net, tokens = Net(), torch.arange(6)
    expected = net(tokens)
    parts = [copy.deepcopy(net) for _ in range(2)]
    runs = [cut(part, [rank, rank + 2], 4).run for rank, part in enumerate(parts)]
    hidden = None
    for stage in range(4):
        part = parts[stage % 2]
        hidden = runs[stage % 2].compute(stage, hidden, lambda net=part: net(tokens))
    assert torch.equal(hidden, expected)


def trained_scale(net: nn.Module) -> None:
    net.scale = nn.Parameter(torch.tensor([1.5]))
    net.pipeline_plan = ["words", "scale", "blocks.*", "head"]


def called_twice(net: nn.Module) -> None:
    net.num_passes = 2


def shared_block(net: nn.Module) -> None:
    net.blocks[3] = net.blocks[0]


def tied_blocks(net: nn.Module) -> None:
    net.blocks[3].layer.weight = net.blocks[0].layer.weight


def block_tied_to_head(net: nn.Module) -> None:
    net.head = nn.Linear(4, 4, bias=False)
    net.head.weight = net.blocks[0].layer.weight


OVER_STAGES = (
    "--pp: the model's blocks share a tensor over stages, blocks.0.layer.weight, which is tied"
)


@pytest.mark.parametrize(("change", "line"), [
    (tied_blocks, OVER_STAGES),
    (block_tied_to_head, OVER_STAGES),
    (shared_block, "--pp: the model calls its blocks twice; leave --pp out"),
    (trained_scale, "--pp: the model's blocks share a tensor that is trained"),
    (called_twice, "--pp: the model calls its blocks twice; leave --pp out"),
])  # fmt: skip
def test_a_model_that_is_no_chain_of_blocks_is_refused(change, line):
    net = Net()
    change(net)
    parts = [copy.deepcopy(net) for _ in range(2)]

    def train() -> None:
        runs = [cut(part, [stage], 2).run for stage, part in enumerate(parts)]
        hidden = runs[0].compute(0, None, lambda: parts[0](torch.arange(6)))
        runs[1].compute(1, hidden, lambda: parts[1](torch.arange(6)))

    with pytest.raises(RequestError) as caught:
        train()
    assert str(caught.value).startswith(line)


def test_blocks_of_one_worker_may_be_tied():
    net = Net()
    net.blocks[2].layer.weight = net.blocks[0].layer.weight
    staged = cut(net, [0, 2], 4)
    assert staged.shared == {"words.weight": (0, 3), "blocks.0.layer.weight": (0, 2)}
    assert net.blocks[2].layer.weight is net.blocks[0].layer.weight


def test_a_layer_in_the_wrong_place_of_a_plan_gives_nan():
    """Or the last stage would train behind weights that it has not."""
    net, tokens = Net(), torch.arange(6)
    net.head.weight = nn.Parameter(torch.ones(6, 4))
    net.pipeline_plan = ["words", "head", "blocks.*"]
    run = cut(net, [1], 2).run
    logits = run.compute(1, torch.ones(6, 4), lambda: net(tokens))
    assert logits.isnan().all()


@pytest.mark.parametrize(("plan", "num_stages", "line"), [
    ([], 2, "--pp 2: --model net has no plan for it; use --dp_shard, or give the network a "
     "pipeline_plan (docs/parallel.md)"),
    (["words", "blocks.*"], 5, "--pp 5: --model net has 4 blocks, and each stage needs one; use "
     "--pp 4 or less"),
    (["blocks.*", "head"], 2, "--pp: the model's plan does not name words.weight"),
    (["words", "blocks", "head"], 2, "--pp: a plan names the blocks once, as 'layers.*' where "
     "layers is their ModuleList or Sequential; this one is words, blocks, head"),
    (["words", "head.*"], 2, "--pp: a plan names the blocks once"),
    (["words", "layers.*"], 2, "--pp: the model has no layers.*, which its plan names"),
])  # fmt: skip
def test_a_plan_that_does_not_fit_is_refused_in_a_line(plan, num_stages, line):
    net = Net()
    net.pipeline_plan = plan
    with pytest.raises(RequestError) as caught:
        cut(net, [0], num_stages)
    assert str(caught.value).startswith(line)


STAGES = ("--pp=2", "--accumulate=2")


@pytest.mark.parametrize(("flags", "line"), [
    (("--pp=3",), "4 workers are no multiple of --pp 3; use one of 1, 2, 4"),
    (("--tp=2", "--pp=4"), "2 workers after --tp 2 are no multiple of --pp 4; use one of 1, 2"),
    ((*STAGES, "--offload=optimizer"), "--offload optimizer: --pp 2 keeps each stage's state on "
     "its device; leave --offload out, or use --dp_shard auto in place of --pp"),
    (("--pp=2",), "--accumulate 1: --pp 2 works on as many micro-batches at once; use --accumulate "
     "2 or more"),
    (("--pp_schedule=gpipe",), "--pp_schedule gpipe orders nothing without --pp 2"),
    (("--pp=4", "--accumulate=6", "--batch_size=6", "--pp_schedule=interleaved"), "--accumulate 6: "
     "--pp_schedule interleaved takes micro-batches 4 at a time; use a multiple of 4"),
    ((*STAGES, "--dp_shard=auto"), "--pp with --zero 3: micro-batches would gather each block "
     "again and again; use --zero 1"),
    ((*STAGES, "--amp_level=O1", "--amp_dtype=float16"), "--pp with --amp_dtype float16: use "
     "bfloat16"),
    ((*STAGES, "--engine=jax"), "--pp 2: engine jax compiles whole steps, which have no stages; "
     "use --dp_shard auto, --tp, or --engine ddp"),
    pytest.param((*STAGES, "--engine=xla"), "--pp 2: engine xla keeps the whole model on each "
                 "worker; use --engine ddp or inductor", marks=[pytest.mark.xla, NEEDS_XLA]),
    ((*STAGES, "--ddp.find_unused_parameters"), "--ddp.find_unused_parameters is not for --pp, "
     "which needs every parameter's gradient on each worker; freeze those that are unused "
     "(requires_grad = False)"),
])  # fmt: skip
def test_flags_that_do_not_go_together_are_refused_in_a_line(flags, line):
    task = config.parse([*TINY, "--data=synthetic", "--nproc_per_node=4", "--device=cpu", *flags])
    with pytest.raises(RequestError) as caught:
        launchers.resolve(task)
    assert str(caught.value) == line


def test_a_model_with_too_few_blocks_is_refused_in_a_line(tmp_path):
    model = "tests.distributed.decoders:decoder"
    done = run(*TINY, "--data=synthetic", "--nproc_per_node=2", f"--model={model}",
               "--seq_len=16", "--pp=2", "--pp_schedule=interleaved", "--accumulate=2",
               f"--output_dir={tmp_path / 'run'}")  # fmt: skip
    assert done.returncode == 2
    (told,) = done.stderr.splitlines()
    assert told.partition("; logs in")[0].endswith(
        f": --pp 2 --pp_schedule interleaved cuts 4 stages, and --model {model} has 2 blocks; use "
        "--pp_schedule 1f1b"
    )


def test_workers_with_different_numbers_of_batches_evaluate_each_sample_once(tmp_path):
    """Of 9 images to validate one pipeline has 5, in two batches, and the other 4, in one."""
    images = mock_images.MockImagePlan(num_classes=3, num_train=8, num_val=3)
    mock_images.make(tmp_path / "images", images)
    evaluations = []
    for name, flags in {"ddp": ("--nproc_per_node=2",),
                        "staged": ("--nproc_per_node=4", "--pp=2")}.items():  # fmt: skip
        done = run(*TINY, f"--data=imagefolder:{tmp_path / 'images'}", "--model=tests.nets:staged",
                   "--accumulate=2", "--ema_decay=0.5", "--save_interval=0", "--lr_schedule=cosine",
                   "--ddp.no-channels_last", f"--output_dir={tmp_path / name}", *flags)  # fmt: skip
        assert done.returncode == 0, done.stderr
        evaluations.append(of_kind(tmp_path / name, records.EvalRecord))
    for expected, of in zip(*evaluations, strict=True):
        assert of.loss == pytest.approx(expected.loss, rel=1e-5)
        assert (of.top1, of.num_samples, of.averaged) == (expected.top1, 9, expected.averaged)
    assert {of.averaged for of in evaluations[1]} == {False, True}
    header = of_kind(tmp_path / "staged", records.RunRecord)[0]
    assert header.mesh == {"pp": 2, "replicate": 2, "shard": 1, "cp": 1, "tp": 1}
    windows = [of_kind(tmp_path / name, records.WindowRecord) for name in ("ddp", "staged")]
    for expected, of in zip(*windows, strict=True):
        assert of.loss == pytest.approx(expected.loss, rel=1e-5)
        assert of.num_samples == expected.num_samples


@pytest.mark.soak
def test_dropout_is_the_same_in_every_run_and_after_a_checkpoint(tmp_path):
    flags = (*TINY, "--model=gpt2_tiny", "--data=synthetic", "--seq_len=16", "--nproc_per_node=2",
             *STAGES, "--warmup_steps=1", "--log_interval=1", "--resume=auto")  # fmt: skip
    for name, num_steps in (("whole", 4), ("legs", 2), ("legs", 4)):
        done = run(*flags, f"--max_steps={num_steps}", f"--output_dir={tmp_path / name}")
        assert done.returncode == 0, done.stderr
    losses = [[w.loss for w in of_kind(tmp_path / name, records.WindowRecord)]
              for name in ("whole", "legs")]  # fmt: skip
    assert len(losses[0]) == 4
    assert losses[0] == losses[1]


@pytest.mark.soak
def test_an_error_in_a_stage_is_told_as_it_is(tmp_path):
    done = run(*TINY, "--data=synthetic", "--model=tests.nets:raises_on_rank1", *STAGES,
               "--nproc_per_node=2", f"--output_dir={tmp_path / 'run'}")  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "accbench: rank 1 failed: ValueError: planted fault"
    )
