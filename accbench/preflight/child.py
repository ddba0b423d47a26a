"""`python -m accbench.preflight.child PARENT MODULE ...` runs MODULE until process PARENT ends."""

import sys


def main() -> int:
    """Run the module's `main(argv)`, and return its exit status."""
    import importlib

    from accbench.system.gc_pause import pause_gc
    from accbench.system.stop_signals import die_with_parent

    parent, module = int(sys.argv[1]), sys.argv[2]
    die_with_parent(parent)
    with pause_gc():
        main = importlib.import_module(module).main
    return int(main(sys.argv[3:]))


if __name__ == "__main__":
    # `python -m` puts the current folder first on sys.path, where a user's file may hide a module
    # of the same name that torch imports. Not in a function: to import that would be too late.
    if not getattr(sys.flags, "safe_path", False):
        sys.path.append(sys.path.pop(0))
    sys.exit(main())
