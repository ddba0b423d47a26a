"""Rows of a table to a number each, by a few linear layers: `--model table_mlp`."""

import dataclasses
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from accbench.models import Spec

NUM_COLUMNS = 16
# name -> width of the hidden layers
WIDTHS = {"table_mlp": 256, "table_mlp_wide": 1024}


@dataclasses.dataclass(frozen=True)
class TableRegression(Spec):
    """{"rows": (N, 16) float32, "targets": (N,) float32}; mean squared error."""

    takes: ClassVar = "rows"
    unit: ClassVar = "rows"
    usual_num_classes: ClassVar = 1
    name: str

    def build(self, num_classes: int) -> nn.Module:
        """Three layers; classes mean nothing here."""
        width = WIDTHS[self.name]
        return nn.Sequential(
            nn.Linear(NUM_COLUMNS, width), nn.ReLU(),
            nn.Linear(width, width), nn.ReLU(),
            nn.Linear(width, 1), nn.Flatten(0),
        )  # fmt: skip

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """The mean over the batch, (). Not in float16, which autocast may give."""
        predicted_N, targets_N = model(batch["rows"]), batch["targets"]
        return functional.mse_loss(predicted_N.to(targets_N.dtype), targets_N)

    def synthetic_batch(self, batch_size: int, num_classes: int, generator: torch.Generator) -> Any:
        """Random rows, and targets that can be learnt from them."""
        rows_ND = torch.randn(batch_size, NUM_COLUMNS, generator=generator)
        return {"rows": rows_ND, "targets": rows_ND.square().mean(1)}

    def problem(self, batch: Any, num_classes: int) -> str | None:
        """What is wrong with a batch from a data source; None if nothing is."""
        num_columns = batch["rows"].shape[1]
        if num_columns == NUM_COLUMNS:
            return None
        return f"rows have {num_columns} columns, where the model takes {NUM_COLUMNS}"


class Family:
    """What accbench asks for."""

    names = tuple(WIDTHS)

    @staticmethod
    def spec(name: str) -> TableRegression:
        """One of `names`."""
        return TableRegression(name)
