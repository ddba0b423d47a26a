"""The public path of `LanguageModel`."""

from accbench.models.tasks.language import LanguageModel

__all__ = ["LanguageModel"]
