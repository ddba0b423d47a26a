"""A limit on how often a step is captured again because Python state of the model changed."""

from accbench.engines.common import python_state
from accbench.errors import RequestError
from accbench.recording.terminal import log

# Consecutive steps that each need a capture of their own.
_MAX_CONSECUTIVE = 8


class RecaptureLimit:
    """Counts consecutive steps before which numbers or functions of the model have changed."""

    def __init__(self) -> None:
        self._num_consecutive = self._num_unneeded = 0
        self._last_id: int | None = None

    def check(
        self, watch: python_state.PythonStateWatch, state_id: int, is_captured: bool,
        is_new_signature: bool,
    ) -> None:  # fmt: skip
        """Count a step, and refuse a model that changes before every step.

        Args:
            watch: what is known of the model's Python state.
            state_id: of the state before this step.
            is_captured: a step was captured for what the model has now.
            is_new_signature: none was for such batches, whatever the Python state.

        Raises:
            RequestError: too many steps in a row differ; the message names what changes.
        """
        last_id, self._last_id = self._last_id, state_id
        if is_captured or last_id in (None, state_id):
            self._num_consecutive = 0
            return
        if is_new_signature:  # it is captured for its shapes, whatever else has changed
            return
        self._num_consecutive += 1
        if self._num_consecutive > _MAX_CONSECUTIVE:
            raise RequestError(
                f"--engine jax captures a step once, and {_describe(watch.changed)} before "
                "every step: keep it in a buffer, a tensor, or use --engine inductor, xla or ddp"
            )

    def note_unneeded(self) -> None:
        """Note that the step is the same although Python state has changed."""
        self._num_consecutive = max(self._num_consecutive - 1, 0)
        self._num_unneeded += 1
        if self._num_unneeded == _MAX_CONSECUTIVE:
            log.warning(
                "numbers of the model change between steps, and each change is traced to see "
                "whether it matters: keep them in a buffer, or outside of the model"
            )


def _describe(names: list[str]) -> str:
    return f"{', '.join(names[:3])} {'changes' if len(names) == 1 else 'change'}"
