"""Train on this machine: `python launch_single_task.py --nproc_per_node=2 [--compiler-opt] ...`.

With `--compare`, several engines in turn: `accbench compare`.
"""

import sys
from pathlib import Path

from accbench import cli

if __name__ == "__main__":
    if "--compare" in sys.argv:
        sys.exit(cli.compare(sys.argv[1:], prog="launch_single_task.py"))
    main_py = Path(__file__).resolve().parent / "main.py"
    sys.exit(cli.run(sys.argv[1:], prog="launch_single_task.py", worker=[str(main_py)]))
