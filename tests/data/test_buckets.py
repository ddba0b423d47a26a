"""Batches padded to a few lengths."""

import pytest
import torch
from torch.utils.data import DataLoader

from accbench.data.buckets import Buckets

PADS = {"input_ids": 0, "labels": -1}


def sample(length: int) -> dict:
    return {"input_ids": torch.arange(1, length + 1), "labels": torch.ones(length), "weight": 2.0}


def test_samples_become_batches_of_few_lengths():
    lengths = [3, 5, 9, 2, 16, 1]
    loader = DataLoader([sample(n) for n in lengths], 2, collate_fn=Buckets((8, 16), PADS).collate)
    batches = [*loader]
    assert [tuple(b["input_ids"].shape) for b in batches] == [(2, 8), (2, 16), (2, 16)]
    assert batches[0]["input_ids"].tolist() == [[1, 2, 3, 0, 0, 0, 0, 0], [1, 2, 3, 4, 5, 0, 0, 0]]
    assert batches[0]["labels"][0].tolist() == [1, 1, 1, -1, -1, -1, -1, -1]
    assert batches[0]["weight"].tolist() == [2, 2]


def test_a_batch_is_padded_by_place_too_and_what_is_not_named_stays():
    padded = Buckets((4,), {"1": 7})((torch.zeros(2, 3), torch.zeros(2, 3)))
    assert isinstance(padded, tuple)
    assert [tuple(part.shape) for part in padded] == [(2, 3), (2, 4)]
    assert padded[1][:, 3].tolist() == [7, 7]


def test_even_buckets():
    assert Buckets.even(100, 3, PADS).sizes == (34, 67, 100)
    assert [Buckets.even(8, 8, PADS).size_for(n) for n in (1, 8)] == [1, 8]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Buckets((), PADS), "at least 1"),
        (lambda: Buckets((0, 4), PADS), "at least 1"),
        (lambda: Buckets.even(4, 5, PADS), "5 buckets for lengths up to 4"),
        (lambda: Buckets((4,), PADS).collate([sample(5)]), "5 is more than the largest bucket, 4"),
        (lambda: Buckets((4,), {"mask": 0}).collate([sample(2)]), "no 'mask' in the batch"),
    ],
)
def test_what_does_not_fit_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
