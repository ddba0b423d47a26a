"""`python -m accbench.preflight.child PARENT MODULE ...`: that module, until the parent ends."""

import ctypes
import os
import runpy
import signal
import sys


def main() -> None:
    """Become the module."""
    parent, module = int(sys.argv[1]), sys.argv[2]
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG, prctl(2)
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)  # it was killed before that was asked
    sys.argv = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
