"""Steps that are captured anew because something of Python's has changed: how often that may be."""

from accbench.engines.common import python_state
from accbench.errors import RequestError
from accbench.recording.terminal import log

# Steps one after the other, each of which is another than the one before.
_MOST_IN_A_ROW = 8


class Changes:
    """Counts the steps in a row before which numbers or functions of a model's have changed."""

    def __init__(self) -> None:
        self._num_in_a_row = self._num_for_nothing = 0

    def before_step(self, watch: python_state.PythonStateWatch | None, is_known: bool) -> None:
        """
        Args:
            is_known: the step was captured for what the model has now.

        Raises:
            RequestError: step after step is another; the message has the name of what changes.
        """
        if is_known or watch is None:
            self._num_in_a_row = 0
            return
        self._num_in_a_row += 1
        if self._num_in_a_row > _MOST_IN_A_ROW:
            raise RequestError(
                f"--engine jax captures a step once, and {_in_words(watch.changed)} before "
                "every step: keep it in a buffer, a tensor, or use --engine inductor, xla or ddp"
            )

    def did_not_matter(self) -> None:
        """Note that the step is the same whatever has changed."""
        self._num_in_a_row -= 1
        self._num_for_nothing += 1
        if self._num_for_nothing == _MOST_IN_A_ROW:
            log.warning(
                "numbers of the model's change between steps, and each is traced to see whether "
                "they matter: keep them in a buffer, or outside of the model"
            )


def _in_words(names: list[str]) -> str:
    if not names:
        return "what it is given changes"
    return f"{', '.join(names[:3])} {'changes' if len(names) == 1 else 'change'}"
