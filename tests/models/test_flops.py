"""Operations of a sample, by hand and as counted; and the rates that reports make of them."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from accbench import models
from accbench.recording import records
from accbench.report import summary, table
from accbench.training import flops
from tests.nets import Autoencoder
from tests.report import fakes


def test_two_linear_layers():
    # Forward 8 x 4 and 4 x 8 products; backward both for the weights, one for what is between.
    assert flops.of_sample(Autoencoder(), 1) == 2 * (8 * 4) * 5


def test_resnet50_has_the_operations_that_its_paper_tells():
    # 4.1e9 multiplications forward (He et al. have 3.8, of the version with the stride elsewhere).
    counted = flops.of_sample(models.resolve("resnet50", 224), 1000)
    assert counted == pytest.approx(3 * 2 * 4.1e9, rel=0.02)


class _Recurrent(Autoencoder):
    def build(self, num_classes: int) -> nn.Module:
        return nn.LSTM(8, 8)


class _Asks(Autoencoder):
    def loss(self, model: nn.Module, batch) -> torch.Tensor:
        loss = super().loss(model, batch)
        return loss * 2 if float(loss) > 1 else loss


@pytest.mark.parametrize("spec", [_Recurrent(), _Asks()])
def test_what_cannot_be_counted_is_not_known(spec):
    assert flops.of_sample(spec, 1) is None


def test_reports_tell_rates_and_the_share_of_a_known_gpus_peak():
    found = [
        replace(record, device_name="NVIDIA H100 80GB HBM3", amp_dtype="bfloat16")
        if isinstance(record, records.RunRecord)
        else replace(record, flops_per_sample=1e12)
        if isinstance(record, records.EndRecord)
        else record
        for record in fakes.run("ddp", 1)
    ]
    row = summary.summarize_records("run", found)
    assert row.tflop_per_s == pytest.approx(row.samples_per_s)
    assert row.peak_share == pytest.approx(row.samples_per_s / (989.4 * row.world_size))
    assert "TFLOP/s" in table.render([row], "md")
    plain = summary.summarize_records("run", fakes.run("ddp", 1))
    assert (plain.tflop_per_s, plain.peak_share) == (None, None)
    assert "TFLOP/s" not in table.render([plain], "md")
