"""`python -m accbench` is the command `accbench`."""

import sys

from accbench.cli import main

sys.exit(main())
