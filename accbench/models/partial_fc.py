"""PartialFC: a class head of which each rank has some classes, and computes with a sample of them.

An et al., Partial FC: Training 10 Million Identities on a Single Machine, 2021, as insightface's
`PartialFC_V2` has it. Embeddings are gathered from all ranks. Each rank compares them with its own
classes: in a training step with those of the batch's labels, and with others drawn at random. The
softmax is over all ranks' classes together.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from accbench.distributed.collectives import (
    RankGroup,
    gather_rows,
    max_over_group,
    sum_over_group,
)


@dataclasses.dataclass(frozen=True)
class ClassHead:
    """The classes of a rank, and how many of them a training step takes."""

    num_classes: int
    """Classes of all ranks together."""
    sample_rate: float
    """The fraction of its classes that a rank computes with in a training step."""
    group: RankGroup | None = None
    """The ranks that share the classes; None: this one has all."""

    @property
    def first(self) -> int:
        """The number of the first class of this rank."""
        return 0 if self.group is None else self.group.rank * self.num_rows

    @property
    def num_rows(self) -> int:
        """Rows of a rank's weight; the last ones may be padding."""
        return math.ceil(self.num_classes / (1 if self.group is None else self.group.size))

    def is_class(self, row: torch.Tensor) -> torch.Tensor:
        """Return which rows are those of a class, and not padding."""
        return row + self.first < self.num_classes


def mean_loss(
    embeddings_NE: torch.Tensor, labels_N: torch.Tensor, weight_CE: torch.Tensor, head: ClassHead,
    with_margin: Callable[[torch.Tensor], torch.Tensor], scale: float,
) -> torch.Tensor:  # fmt: skip
    """Return the mean cross-entropy over the batches of all ranks, the same on each, ().

    Its gradients are right where embeddings' are averaged over the ranks, and `weight`'s are not.

    Args:
        embeddings_NE: of length 1, of this rank's batch; all ranks have equally many.
        labels_N: their classes.
        weight_CE: this rank's rows of the classes' vectors.
        head: which they are.
        with_margin: what becomes of the cosines with the labels' classes.
        scale: the logits' factor.
    """
    embeddings_ME, own_M = _of_all_ranks(embeddings_NE, labels_N, head)
    rows_K = _sampled_rows(own_M, head)
    if rows_K is None:
        rows_K, sampled_KE = torch.arange(head.num_rows, device=own_M.device), weight_CE
    else:
        sampled_KE = weight_CE.index_select(0, rows_K)
    cosines_MK = _cosines(embeddings_ME, sampled_KE)
    is_own_M1 = _is_own(own_M, head).unsqueeze(1)
    column_M1 = torch.searchsorted(rows_K, own_M).clamp(max=len(rows_K) - 1).unsqueeze(1)
    of_label_M1 = cosines_MK.gather(1, column_M1)
    of_label_M1 = torch.where(is_own_M1, with_margin(of_label_M1), of_label_M1)
    logits_MK = scale * cosines_MK.scatter(1, column_M1, of_label_M1)
    logits_MK = logits_MK.masked_fill(~head.is_class(rows_K), -math.inf)
    losses_M: torch.Tensor = _CrossEntropy.apply(logits_MK, column_M1, is_own_M1, head.group)
    return losses_M.mean()


@torch.no_grad()
def sums(
    embeddings_NE: torch.Tensor, labels_N: torch.Tensor, weight_CE: torch.Tensor, head: ClassHead,
    scale: float,
) -> torch.Tensor:  # fmt: skip
    """Return sums over this rank's batch: loss without margin, top-1, top-5, samples; (4,).

    Ranks may have different numbers of samples; all call it.
    """
    most = len(labels_N)
    if head.group is not None:  # gathered batches are equally large
        most = int(max_over_group(torch.tensor([most], device=labels_N.device), head.group).item())
    missing = most - len(labels_N)
    embeddings_ME, own_M = _of_all_ranks(
        functional.pad(embeddings_NE, (0, 0, 0, missing)),
        functional.pad(labels_N, (0, missing), value=-1), head,
    )  # fmt: skip
    rows_C = torch.arange(head.num_rows, device=own_M.device)
    logits_MC = scale * _cosines(embeddings_ME, weight_CE)
    logits_MC = logits_MC.masked_fill(~head.is_class(rows_C), -math.inf)
    column_M1 = own_M.clamp(0, head.num_rows - 1).unsqueeze(1)
    is_own_M1 = _is_own(own_M, head).unsqueeze(1)
    log_total_M, of_label_M, _ = _log_sum(logits_MC, column_M1, is_own_M1, head.group)
    better_M = (logits_MC > of_label_M.unsqueeze(1)).sum(1)
    if head.group is not None:
        better_M = sum_over_group(better_M, head.group)
    begin = 0 if head.group is None else head.group.rank * most
    of_batch = slice(begin, begin + len(labels_N))
    loss_N, better_N = (log_total_M - of_label_M)[of_batch], better_M[of_batch]
    counted = [(better_N < 1), (better_N < 5), torch.ones_like(labels_N)]
    valid_N = labels_N >= 0
    values = [torch.where(valid_N, loss_N, 0), *(valid_N & each.bool() for each in counted)]
    return torch.stack([value.sum().float() for value in values])


def _of_all_ranks(
    embeddings_NE: torch.Tensor, labels_N: torch.Tensor, head: ClassHead
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all ranks' embeddings, and their labels as rows of this one's weight."""
    if head.group is None:
        return embeddings_NE, labels_N
    labels_M = gather_rows(labels_N, head.group)
    return gather_rows(embeddings_NE, head.group), labels_M - head.first


def _is_own(own_M: torch.Tensor, head: ClassHead) -> torch.Tensor:
    return (own_M >= 0) & (own_M < head.num_rows)


@torch.no_grad()
def _sampled_rows(own_M: torch.Tensor, head: ClassHead) -> torch.Tensor | None:
    """Draw the rows to compute with: those of labels, and others up to the sample rate.

    Their number is that of the sample rate, or of the gathered batch where that is larger, so that
    the host need not know how many labels are this rank's.

    Returns:
        Rows in ascending order, (K,); None for all.
    """
    num_rows = head.num_rows
    num_sampled = max(int(head.sample_rate * num_rows), min(len(own_M), num_rows))
    if num_sampled >= num_rows:
        return None
    rows = torch.arange(num_rows, device=own_M.device)
    priorities = torch.where(head.is_class(rows), torch.rand(num_rows, device=own_M.device), -1)
    priorities = functional.pad(priorities, (0, 1))  # one more, for labels of other ranks
    priorities[torch.where(_is_own(own_M, head), own_M, num_rows)] = 2
    return priorities[:-1].topk(num_sampled).indices.sort().values


def _cosines(embeddings_ME: torch.Tensor, weight_CE: torch.Tensor) -> torch.Tensor:
    cosines_MC = functional.linear(embeddings_ME, functional.normalize(weight_CE))
    return cosines_MC.to(torch.promote_types(cosines_MC.dtype, torch.float32))


def _log_sum(
    logits_MC: torch.Tensor, column_M1: torch.Tensor, is_own_M1: torch.Tensor,
    group: RankGroup | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the log of the sum over all ranks' classes, the label's logit, and probabilities."""
    largest_M = logits_MC.amax(1)
    largest_M = largest_M if group is None else max_over_group(largest_M, group)
    exp_MC = (logits_MC - largest_M.unsqueeze(1)).exp_()
    of_label_M1 = torch.where(is_own_M1, logits_MC.gather(1, column_M1), 0)
    totals_M2 = torch.stack([exp_MC.sum(1), of_label_M1.squeeze(1)], 1)
    totals_M2 = totals_M2 if group is None else sum_over_group(totals_M2, group)
    total_M, of_label_M = totals_M2.unbind(1)
    return total_M.log() + largest_M, of_label_M, exp_MC.div_(total_M.unsqueeze(1))


class _CrossEntropy(torch.autograd.Function):
    """Cross-entropy over the classes of all ranks; each has the gradient of its own logits."""

    @staticmethod
    def forward(
        ctx: Any, logits_MC: torch.Tensor, column_M1: torch.Tensor, is_own_M1: torch.Tensor,
        group: RankGroup | None,
    ) -> torch.Tensor:  # fmt: skip
        log_total_M, of_label_M, p_MC = _log_sum(logits_MC, column_M1, is_own_M1, group)
        ctx.save_for_backward(p_MC, column_M1, is_own_M1)
        return log_total_M - of_label_M

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        p_MC, column_M1, is_own_M1 = ctx.saved_tensors
        one_M1 = is_own_M1.to(p_MC.dtype)
        difference_MC = p_MC.scatter_add(1, column_M1, -one_M1)
        return difference_MC.mul_(gradients[0].unsqueeze(1)), None, None, None
