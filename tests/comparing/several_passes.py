"""Parts of the numerics pass one after the other: python -m tests.comparing.several_passes JSON.

JSON is a list of what `python -m accbench.comparing.numerics` is told for each.
"""

import json
import sys

from accbench.comparing import numerics

if __name__ == "__main__":
    sys.exit(max([numerics.main(arguments) for arguments in json.loads(sys.argv[1])]))
