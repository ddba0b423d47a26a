"""What a comparison's fork server imports, once for all launchers: for nobody else."""

import signal

from accbench.system.gc_pause import pause_gc

with pause_gc():
    import accbench.comparing.numerics
    import accbench.comparing.run
    import accbench.launchers.local  # noqa: F401

# Held back while this process was started, and ignored since.
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
