"""The models for `accbench run --model for_launcher:NAME`, whose workers import this module."""

import os

import workload
from torch import nn

from accbench.models.tasks.language import LanguageModel

# The launcher's own process imports it too, and takes no steps.
_case = workload.begin() if "PEER_CASE" in os.environ else None


def _net(num_classes: int) -> nn.Module:
    assert _case is not None
    return workload.build(_case)


resnet18 = vit_ti = _net
gpt2_tiny = LanguageModel("gpt2_tiny", _net, workload.NUM_TOKENS, workload.SEQ_LEN)
