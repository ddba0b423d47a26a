"""`accbench compare` as ever, but that its launchers find Dask imported.

python -m tests.launchers.dask.compared FLAGS
"""

import sys

if __name__ == "__main__":
    from accbench import cli
    from accbench.comparing import run

    run._PRELOADED.append("distributed")
    sys.exit(cli.main(["compare", *sys.argv[1:]]))
