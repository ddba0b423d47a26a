"""Any command as `python` starts it, in a process that `tests.forked` has forked.

    python -m tests.started OPTIONS COMMAND...

COMMAND is what follows `python`: a script, or -m and a module, and their arguments. OPTIONS are
JSON of any of these: `folder`, in which it starts; `pid_file`, in which it finds its process id;
`ignores_hangups`, as nohup has it; `network`, the namespace that it is in.
"""

import json
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any


def prepare(options: dict[str, Any]) -> None:
    """Make this process what a shell makes of one before it starts a command."""
    os.setsid()  # signals to its group are for it alone, and not for the tests
    ignored = options.get("ignores_hangups", False)
    signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    os.chdir(options.get("folder", "."))
    if "network" in options:
        with open(f"/run/netns/{options['network']}") as namespace:
            os.setns(namespace.fileno(), os.CLONE_NEWNET)
    if "pid_file" in options:
        path = Path(options["pid_file"])
        unfinished = path.with_suffix(".new")
        unfinished.write_text(str(os.getpid()))
        unfinished.rename(path)


def run(command: list[str]) -> None:
    """Run `python COMMAND` in this process."""
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path.insert(0, str(Path(command[0]).resolve().parent))
        runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    asked, *words = sys.argv[1:]
    prepare(json.loads(asked))
    try:
        run(words)
    except SystemExit:
        raise
    except BaseException:
        # Python itself would ask it, and a run ends its record there.
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        sys.exit(1)
