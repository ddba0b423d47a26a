"""`accbench compare` as ever, but for its workers: these are forked, see `tests.forked`.

    python -m tests.compared FLAGS

How long their start takes is then not a user's.
"""

import sys

if __name__ == "__main__":
    from accbench import cli
    from accbench.comparing import run

    run._PRELOADED.append("tests.forked_workers")
    sys.exit(cli.main(["compare", *sys.argv[1:]]))
