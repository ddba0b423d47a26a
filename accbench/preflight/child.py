"""`python -m accbench.preflight.child PARENT MODULE ...`: that module, until the parent ends."""

import sys


def main() -> int:
    """Become the module, whose `main` takes arguments and returns the exit status."""
    import importlib

    from accbench.stop_signals import die_with_parent
    from accbench.uncollected import pause_gc

    parent, module = int(sys.argv[1]), sys.argv[2]
    die_with_parent(parent)
    with pause_gc():
        main = importlib.import_module(module).main
    return int(main(sys.argv[3:]))


if __name__ == "__main__":
    # `python -m` puts the current folder first, where a file of a user's hides the module of
    # its name that torch imports.
    if not getattr(sys.flags, "safe_path", False):
        sys.path.append(sys.path.pop(0))
    sys.exit(main())
