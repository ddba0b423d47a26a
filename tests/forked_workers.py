"""What the fork server of `tests.compared` imports, so that workers can be forked from it."""

from tests import forked

forked.prepare()
forked.fork_workers()
