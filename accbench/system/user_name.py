"""The user's name, which torch and Triton need and a container's user may lack."""

import getpass
import os


def lookup() -> str | None:
    """Return the name that `getpass.getuser` gives; None if it fails (`docker -u 12345`)."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # KeyError before Python 3.13
        return None


def stand_in() -> str:
    """Return a name for a user who has none."""
    return f"uid{os.getuid()}"


def environment() -> dict[str, str]:
    """Return the variables that give a worker's process a user name; none if it has one."""
    return {} if lookup() else dict.fromkeys(("LOGNAME", "USER"), stand_in())
