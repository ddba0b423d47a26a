"""Models of text and of videos, through what a spec promises."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from accbench import cli, models
from accbench.errors import RequestError
from accbench.models import bert
from accbench.models.tasks.language import LanguageModel
from accbench.training import label_counts

LENGTH, VOCABULARY = 16, 64
OF_TEXT = ("gpt2_tiny", "bert_tiny", "llama_tiny", "lstm_tiny")


def built(name: str, **sizes):
    if name not in ("lstm_tiny", "convlstm_tiny"):
        pytest.importorskip("transformers")
    spec = models.resolve(name, sizes.get("image_size", 32), LENGTH)
    torch.manual_seed(0)
    net = spec.build(VOCABULARY)
    return spec, net, spec.synthetic_batch(2, VOCABULARY, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", OF_TEXT)
def test_loss_and_score_are_means_and_sums_over_the_tokens_to_be_told(name):
    spec, net, batch = built(name)
    net.eval()
    assert (spec.takes, spec.unit, spec.units_per_sample) == ("tokens", "tokens", LENGTH)
    assert spec.problem(batch, VOCABULARY) is None
    whole = spec.score(net, batch).detach()
    assert whole[0] / whole[3] == pytest.approx(spec.loss(net, batch).item(), rel=1e-5)
    assert 3.5 < whole[0] / whole[3] < 5  # nothing is learned: log(64) is 4.2
    if name != "bert_tiny":
        assert whole[3] == 2 * LENGTH
    # The second sample counts for nothing when its labels are ignored.
    first = {key: tensor[:1] for key, tensor in batch.items()}
    padded = {**batch, "labels": batch["labels"].clone()}
    padded["labels"][1] = -1
    assert torch.allclose(spec.score(net, padded), spec.score(net, first), atol=1e-3)
    assert spec.loss(net, padded).item() == pytest.approx(spec.loss(net, first).item(), rel=1e-5)
    padded["labels"][0] = -1
    assert spec.loss(net, padded).item() == 0
    assert spec.count_labels(batch) == whole[3]
    assert spec.count_labels(padded) == 0


@pytest.mark.parametrize("name", ["bert_tiny", "lstm_tiny"])
def test_parts_of_a_step_weigh_as_many_labels_as_they_have(name):
    spec, net, batch = built(name)
    net.eval()
    batch["labels"][0, 3:] = -1
    whole = spec.loss(net, batch)
    rows = [{key: tensor[row : row + 1] for key, tensor in batch.items()} for row in range(2)]
    unlabelled = {**rows[0], "labels": torch.full_like(rows[0]["labels"], -1)}
    for parts in (rows, [*rows, unlabelled]):
        losses = [spec.loss(net, part) for part in label_counts.of_parts(spec, parts)]
        torch.testing.assert_close(sum(losses) / len(losses), whole)
    (alone,) = label_counts.of_parts(spec, [unlabelled])
    gradients = torch.autograd.grad(spec.loss(net, alone), [*net.parameters()], allow_unused=True)
    assert all(gradient is None or not gradient.any() for gradient in gradients)


def test_labels_that_a_subclass_makes_are_not_counted_for_it():
    class Chooses(LanguageModel):
        def logits_and_labels(self, model, batch):
            logits, labels = super().logits_and_labels(model, batch)
            return logits[:3], labels[:3]

    class Counts(Chooses):
        def count_labels(self, batch):
            return 3

    unknown = SimpleNamespace()
    specs = [kind("mine", nn.Identity) for kind in (LanguageModel, Chooses, Counts)]
    assert [label_counts.may_differ(spec, unknown) for spec in specs] == [True, False, True]
    full = SimpleNamespace(ignores_labels=False)
    assert not label_counts.may_differ(specs[0], full)
    assert label_counts.may_differ(models.resolve("bert_tiny", 32, LENGTH), full)


@pytest.mark.parametrize("name", OF_TEXT)
def test_every_parameter_is_trained(name):
    spec, net, batch = built(name)
    spec.loss(net, batch).backward()
    for parameter_name, parameter in net.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert torch.isfinite(parameter.grad).all()
    embedding = next(m for m in net.modules() if isinstance(m, nn.Embedding))
    given = batch["input_ids"].unique()
    if name != "bert_tiny":
        assert embedding.weight.grad[given].abs().sum(1).min() > 0  # token 0, too


@pytest.mark.parametrize("name", ["gpt2_tiny", "llama_tiny", "lstm_tiny"])
def test_no_token_sees_what_follows(name):
    spec, net, batch = built(name)
    net.eval()
    other = batch["input_ids"].clone()
    other[:, 9:] = (other[:, 9:] + 1) % VOCABULARY
    one, two = (
        spec.logits_and_labels(net, {**batch, "input_ids": ids})[0]
        for ids in (batch["input_ids"], other)
    )
    one, two = one.view(2, LENGTH, -1), two.view(2, LENGTH, -1)
    assert torch.allclose(one[:, :9], two[:, :9], atol=1e-5)
    assert not torch.allclose(one[:, 9:], two[:, 9:], atol=1e-5)


def test_tied_embeddings_are_one_parameter():
    for name, tied in (("gpt2_tiny", True), ("bert_tiny", True), ("llama_tiny", False)):
        _, net, _ = built(name)
        net = getattr(net, "net", net)
        same = net.get_output_embeddings().weight is net.get_input_embeddings().weight
        assert same == tied, name


def test_masks_of_bert():
    """Their parts, and that they follow from the text alone."""
    texts = torch.randint(0, 1000, (200, 128), generator=torch.Generator().manual_seed(0))
    given, told = bert.mask_tokens(texts, torch.zeros_like(texts), 1000)
    chosen = told >= 0
    assert torch.equal(told[chosen], texts[chosen])
    assert torch.equal(given[~chosen], texts[~chosen])
    assert chosen.float().mean() == pytest.approx(0.15, abs=0.01)
    masked = given[chosen] == 1000
    kept = given[chosen] == texts[chosen]
    assert masked.float().mean() == pytest.approx(0.8, abs=0.03)
    assert kept.float().mean() == pytest.approx(0.1, abs=0.02)
    assert given.min() >= 0
    assert given[chosen][~masked & ~kept].unique().numel() > 200
    # Each place alike, and a text with one other token has other masks.
    assert chosen.float().mean(dim=0).std() < 0.05
    again, _ = bert.mask_tokens(texts[:1], torch.zeros(1, 128), 1000)
    assert torch.equal(again, given[:1])
    changed = texts[:1].clone()
    changed[0, 0] += 1
    _, told_then = bert.mask_tokens(changed, torch.zeros(1, 128), 1000)
    assert 10 < ((told_then >= 0) != chosen[:1]).sum() < 60


def test_too_long_a_text_is_refused_at_once(capsys):
    with pytest.raises(RequestError, match="positions for 1024 tokens, fewer than --seq_len 1025"):
        models.resolve("gpt2", 224, 1025)
    assert cli.main(["run", "--model=bert_base", "--data=synthetic", "--seq_len=513"]) == 2
    assert "--seq_len 513" in capsys.readouterr().err


def test_convlstm_sees_the_frames_before_alone():
    spec, net, video = built("convlstm_tiny", image_size=16)
    assert video.shape == (2, 6, 1, 16, 16)
    assert (spec.takes, spec.unit, spec.units_per_sample) == ("videos", "frames", 6)
    frames = video.float() / 255
    assert set(frames.unique().tolist()) == {0.0, 1.0}
    assert (frames[:, 1:] != frames[:, :-1]).any()
    logits = net(frames)
    other = frames.clone()
    other[:, 3:] = 1 - other[:, 3:]
    assert torch.allclose(net(other)[:, :3], logits[:, :3], atol=1e-6)
    assert not torch.allclose(net(other)[:, 3], logits[:, 3], atol=1e-3)
    score = spec.score(net, video)
    assert score[3] == 2 * 6
    assert score[1:3].isnan().all()


def test_convlstm_learns():
    spec, net, video = built("convlstm_tiny", image_size=16)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = spec.loss(net, video)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
