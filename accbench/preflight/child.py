"""`python -m accbench.preflight.child PARENT MODULE ...`: that module, until the parent ends."""

import sys


def main() -> None:
    """Become the module."""
    import runpy

    from accbench.stop_signals import die_with_parent

    parent, module = int(sys.argv[1]), sys.argv[2]
    die_with_parent(parent)
    sys.argv = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    # `python -m` puts the current folder first, where a file of a user's hides the module of
    # its name that torch imports.
    if not getattr(sys.flags, "safe_path", False):
        sys.path.append(sys.path.pop(0))
    main()
