"""Which runs something else has disturbed, by what was seen of the machine and not by their speed.

Leaving out what looks slow would move a result to where one wants it. What others took of the
machine has no part in the result, so a run may be repeated for it, by a rule fixed beforehand.
"""

import dataclasses
import statistics
from collections.abc import Sequence

from accbench.recording.records import WindowRecord
from accbench.report.run import RecordedRun

# Runs before a machine's usual load is known.
_FEWEST_RUNS = 4


@dataclasses.dataclass(frozen=True)
class RepeatRule:
    """When a run of a round is measured again.

    On an idle machine others take 1 to 3 % of two cores, and the kernel's ticks of 10 ms add as
    much in a window of half a second. The limits lie well above that, and below what a program of
    one busy thread takes of four cores.
    """

    max_other_cpu_share: float = 0.10
    max_stolen_cpu_share: float = 0.05
    max_throttled_cpu_share: float = 0.10
    max_swapped_in_bytes_per_s: float = 4e6
    max_disturbed_windows: float = 0.25
    """Share of a run's measured windows, 0..1. The median of the windows bears a few."""
    max_repeats: int = 8
    """In the whole comparison."""

    def disturbance_of(self, run: RecordedRun) -> str | None:
        """Say what disturbed more of a run's windows than the rule allows; None if nothing did."""
        sampled = [window for window in run.steady if window.other_cpu_share is not None]
        causes = [self._causes(window) for window in sampled]
        disturbed = [found for found in causes if found]
        if len(disturbed) <= self.max_disturbed_windows * len(sampled):
            return None
        most = max(
            {cause for found in disturbed for cause in found},
            key=lambda cause: (sum(cause in found for found in disturbed), cause),
        )
        value = statistics.median(found[most] for found in disturbed if most in found)
        return f"{_WORDS[most].format(value)} in {len(disturbed)} of {len(sampled)} windows"

    def _causes(self, window: WindowRecord) -> dict[str, float]:
        """Return what went beyond its limit: name -> value."""
        # Records of before have no such time; the window's own is the least that it was.
        sampled_s = window.sampled_s or window.wall_s
        swapped_in_bytes_per_s = (window.swapped_in_bytes or 0) / sampled_s if sampled_s else 0.0
        values_and_limits = {
            "other_cpu_share": (window.other_cpu_share, self.max_other_cpu_share),
            "stolen_cpu_share": (window.stolen_cpu_share, self.max_stolen_cpu_share),
            "throttled_cpu_share": (window.throttled_cpu_share, self.max_throttled_cpu_share),
            "swapped_in_bytes_per_s": (swapped_in_bytes_per_s, self.max_swapped_in_bytes_per_s),
        }
        return {
            name: value
            for name, (value, limit) in values_and_limits.items()
            if value is not None and value > limit
        }

    def asks_to_repeat(
        self, run: RecordedRun, runs: Sequence[RecordedRun], num_repeats: int, is_repeat: bool
    ) -> bool:
        """Return whether a run that has just ended is measured again.

        A run is repeated once. Where more than half of the comparison's runs are disturbed, that is
        the machine's usual state, and all rounds stand.

        Args:
            run: the run.
            runs: all runs of rounds so far, with this one and those that were repeated.
            num_repeats: repeats in the comparison so far.
            is_repeat: whether this run is a repeat already.
        """
        if is_repeat or num_repeats >= self.max_repeats or self.disturbance_of(run) is None:
            return False
        num_disturbed = sum(self.disturbance_of(other) is not None for other in runs)
        return len(runs) < _FEWEST_RUNS or num_disturbed <= len(runs) / 2


_WORDS = {
    "other_cpu_share": "others used {:.0%} of the machine",
    "stolen_cpu_share": "the hypervisor took {:.0%} of the machine",
    "throttled_cpu_share": "heat or the container's limit held back {:.0%} of the machine",
    "swapped_in_bytes_per_s": "{:,.0f} bytes a second came back from swap space",
}
