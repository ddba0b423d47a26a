"""PartialFC in one process: the whole head at sample rate 1, labels and others below it."""

from dataclasses import replace

import pytest
import torch

from tests.nets.structures import PartialFace, TinyFace

NUM_CLASSES, BATCH = 200, 6


def build(spec):
    torch.manual_seed(0)
    net = spec.build(NUM_CLASSES).double()
    generator = torch.Generator().manual_seed(1)
    return net, spec.synthetic_batch(BATCH, NUM_CLASSES, generator)


def test_with_all_classes_it_is_the_whole_head():
    of = {}
    for spec in (TinyFace(), PartialFace()):
        net, batch = build(spec)
        loss = spec.loss(net, batch)
        loss.backward()
        score = spec.score(net.eval(), batch)
        gradients = {name: p.grad for name, p in net.named_parameters()}
        of[type(spec)] = loss.item(), gradients, score.tolist()
    (loss, gradients, score), (expected, whole, whole_score) = of[PartialFace], of[TinyFace]
    assert loss == pytest.approx(expected, rel=1e-12)
    assert score == pytest.approx(whole_score, rel=1e-6)
    assert gradients.keys() == whole.keys()
    for name, gradient in whole.items():
        assert (gradients[name] - gradient).norm() < 1e-10 * gradient.norm(), name


def test_a_step_takes_the_classes_of_its_labels_and_others_at_random():
    spec = replace(PartialFace(), sample_rate=0.1)
    net, batch = build(spec)
    of_all = TinyFace().loss(net, batch)
    taken = []
    for _ in range(2):
        net.zero_grad()
        loss = spec.loss(net, batch)
        loss.backward()
        rows = net.net.classes.grad.abs().sum(1).nonzero().flatten()
        assert len(rows) == 0.1 * NUM_CLASSES
        assert {*batch[1].tolist()} <= {*rows.tolist()}
        assert loss < of_all  # as it has fewer negatives
        taken.append({*rows.tolist()})
    assert taken[0] != taken[1]
    # Labels come first: of 30 no fewer than theirs.
    many = spec.synthetic_batch(30, NUM_CLASSES, torch.Generator().manual_seed(2))
    net.zero_grad()
    spec.loss(net, many).backward()
    rows = net.net.classes.grad.abs().sum(1).nonzero().flatten()
    assert {*many[1].tolist()} <= {*rows.tolist()}
    assert len(rows) == 30
