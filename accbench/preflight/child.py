"""`python -m accbench.preflight.child PARENT MODULE ...`: that module, until the parent ends."""

import runpy
import sys

from accbench.stop_signals import die_with_parent


def main() -> None:
    """Become the module."""
    parent, module = int(sys.argv[1]), sys.argv[2]
    die_with_parent(parent)
    sys.argv = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
