"""The launcher of the numerics pass, which checks training step by step against float64.

`python -m accbench.comparing.numerics reference NUM_SHARDS FLAGS` makes a reference in the
run's folder; with `NUM_SHARDS:reuse` it takes the one that an earlier comparison kept, or keeps
this one; `NUM_SHARDSxK` is for K workers that share each shard's batch, and
`NUM_SHARDS:undropped` has dropout drop nothing. `... check REFERENCE FLAGS`
holds an engine against it and leaves a run's folder whose records hold `numerics` lines in place of
windows. `... floor REFERENCE FLAGS` does that for plain ddp, and repeats each step to measure the
effect of rounding in it. `... free_draws REFERENCE FLAGS` repeats plain ddp's free run, where a
row's verdict depends on that.

Before each checked step the engine loads the reference's state, so that every step is a test of
its own and errors do not accumulate. Then it trains freely from the start, as in a run. Nothing
here is timed. `numerics_worker` is what each worker does.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from accbench import config, launchers
from accbench.comparing import reference_files
from accbench.comparing.reference_cache import FloorEntry
from accbench.errors import RequestError
from accbench.launchers.common.run import run

PARTS = ("reference", "floor", "check", "free_draws")
_WORKER = ("-m", "accbench.comparing.numerics_worker_process")


def main(argv: Sequence[str]) -> int:
    """Launch the workers of one part of the numerics pass, and return the exit status.

    Args:
        argv: the part, its argument (see above), and the flags of a run.

    Raises:
        RequestError: there is no such part.
    """
    part, argument, *flags = argv
    check_part(part)
    entry = _floor_entry(Path(argument), flags) if part == "floor" else None
    if entry is not None and entry.fetch():
        return 0
    status = run(flags, prog="accbench numerics", worker=[*_WORKER, part, argument], attached=True)
    if entry is not None and status == 0:
        entry.store()
    return status


def _floor_entry(reference_dir: Path, flags: Sequence[str]) -> FloorEntry | None:
    """Return where plain ddp's pass is kept; None where its reference is not."""
    try:
        task = launchers.resolve(config.parse(flags))
        facts = reference_files.read_facts(reference_dir / reference_files.FOLDER)
    except RequestError:  # the pass itself tells
        return None
    return None if facts.cache_key is None else FloorEntry(facts.cache_key, task)


def check_part(part: str) -> None:
    """Check the name of a part of the numerics pass.

    Raises:
        RequestError: there is no such part.
    """
    if part not in PARTS:
        raise RequestError(f"the numerics pass has the parts {', '.join(PARTS)}, not {part!r}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
