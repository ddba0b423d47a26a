"""What the fork server of `tests.compared` imports, so that workers can be forked from it."""

import importlib

from tests import forked

for module in forked.IMPORTED:
    importlib.import_module(module)
forked.fork_workers()
