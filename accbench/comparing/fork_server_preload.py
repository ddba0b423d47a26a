"""Imports for a comparison's fork server, made once for all launchers.

Only the fork server imports this module, as it also unblocks Ctrl-C.
"""

import contextlib
import signal

from accbench.system.gc_pause import pause_gc

with pause_gc():
    import accbench.comparing.numerics
    import accbench.comparing.run
    import accbench.launchers.local  # noqa: F401
    from accbench import config

    # Imports all plug-ins, for whose options each launcher reads its flags.
    with contextlib.suppress(Exception):  # the comparison itself meets it, and tells
        config.parse([])

# The comparison blocked and ignored it while it started this process.
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
