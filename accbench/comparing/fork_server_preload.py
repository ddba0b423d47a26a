"""Imports for a comparison's fork server, made once for all launchers.

Only the fork server imports this module, as it also unblocks Ctrl-C.
"""

import signal

from accbench.system.gc_pause import pause_gc

with pause_gc():
    import accbench.comparing.numerics
    import accbench.comparing.run
    import accbench.launchers.local  # noqa: F401

# The comparison blocked and ignored it while it started this process.
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
