"""The name of the user, which torch and Triton ask for and a container's user may not have."""

import getpass
import os


def found() -> str | None:
    """Return the name that `getpass.getuser` gives; None where it fails (`docker -u 12345`)."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # KeyError before Python 3.13
        return None


def stand_in() -> str:
    """Return a name for a user who has none."""
    return f"uid{os.getuid()}"


def environment() -> dict[str, str]:
    """Return the variables that give a worker's process a name; none where it has one."""
    return {} if found() else dict.fromkeys(("LOGNAME", "USER"), stand_in())
