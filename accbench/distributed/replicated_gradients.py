"""Check of `--tp`: ranks that share a model's layers have one gradient of what none of them cuts.

A parameter between a layer that is cut by outputs and one that is cut by inputs, such as the slope
of a PReLU or the norm of an attention's queries, computes with this rank's part. Its gradient is a
part as well, which nothing sums, so that the ranks' copies would drift apart.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist

from accbench.errors import RequestError

# Each parameter's first steps are looked at: a block that starts as zero has no gradient in one.
_NUM_STEPS = 3
# What ranks compute alike is equal to the bit on a CPU. On GPUs other kernels may be tuned on other
# ranks, and bfloat16 has two to three digits. Parts differ by about their own size.
_TOLERANCE = 0.05
# In terms of the largest gradient, below which a gradient may be nothing but rounding.
_FLOOR = 1e-5


class ReplicatedGradientCheck:
    """Compares the ranks' gradients in the first steps.

    Args:
        group: the ranks of one model's layers.
        device: this rank's.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._num_steps: dict[str, int] = {}

    def check(self, gradients: Mapping[str, torch.Tensor | None]) -> None:
        """Compare gradients over the ranks; all ranks of the group call it in each step.

        The host waits for the device in the first steps, and in those that overflow.

        Args:
            gradients: of the trained parameters that are not cut, by name, or this rank's rows of
                them, which the others have as well.

        Raises:
            RequestError: one differs; on all ranks of the group.
        """
        names = [name for name in gradients if self._num_steps.get(name, 0) < _NUM_STEPS]
        if not names:
            return
        local = torch.stack([self._summary(gradients[name]) for name in names])
        gathered = [torch.empty_like(local) for _ in range(self._group.size())]
        dist.all_gather(gathered, local, group=self._group)
        summaries = torch.stack(gathered).cpu()
        if not summaries.isfinite().all():
            return  # the loss scale is still too large
        self._num_steps |= {name: self._num_steps.get(name, 0) + 1 for name in names}
        norms = summaries[..., 0].amax(0)
        spreads = (summaries.amax(0) - summaries.amin(0)).amax(-1)
        differing = (spreads > _TOLERANCE * norms + _FLOOR * norms.max()).nonzero()
        if len(differing):
            raise RequestError(
                f"--tp {self._group.size()}: workers have different gradients of "
                f"{names[int(differing[0])]}, which computes with a part of a cut layer's outputs; "
                "have the plan say replicated_with_grad_allreduce of its module, which sums them, "
                "move it out from between the cut layers, or leave these out of the plan"
            )

    def _summary(self, gradient: torch.Tensor | None) -> torch.Tensor:
        """Return a gradient's norm and sum, float64 (2,); large parts may have one norm."""
        if gradient is None:
            return torch.zeros(2, dtype=torch.float64, device=self._device)
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)
        return torch.stack([norm, gradient.sum(dtype=torch.float64)]).to(self._device)
