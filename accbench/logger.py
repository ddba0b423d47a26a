"""Notes of your own beside a run's: `from accbench.logger import RunLogger`."""

from accbench.recording.logger import RunLogger

__all__ = ["RunLogger"]
