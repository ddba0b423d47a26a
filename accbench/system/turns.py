"""Turns with other runs on this machine, which `accbench compare` gives between windows.

A run that has a turn trains a window and then waits, without using the processors, until it is
given the next one. Each worker has a connection of its own: on it goes one byte for each.
"""

import contextlib
import socket

SOCKET_VARIABLE = "ACCBENCH_TURNS"
"""The path of the socket of the comparison that gives turns; unset where nothing does."""
WINDOW_DONE, LAST_WINDOW_DONE, GO, GO_ON_ALONE = b"w", b"l", b"g", b"a"


class Turns:
    """A worker's turns.

    Args:
        path: of the socket of who gives them. Without one, or where nobody listens any more,
            `wait` returns at once.
    """

    def __init__(self, path: str | None) -> None:
        self._socket: socket.socket | None = None
        if not path:
            return
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(path)
        except OSError:
            connection.close()
        else:
            self._socket = connection

    @property
    def are_given(self) -> bool:
        """Say whether a comparison gives turns."""
        return self._socket is not None

    def wait(self, is_last: bool = False) -> bool:
        """Say that a window is done, wait for the next turn, and return whether others had theirs.

        It returns if the other end is gone: nobody waits for this run then.

        Args:
            is_last: whether no other window follows, so that the next turn is for the run's end.
        """
        if self._socket is None:
            return False
        with contextlib.suppress(ConnectionError):
            self._socket.sendall(LAST_WINDOW_DONE if is_last else WINDOW_DONE)
            return self._socket.recv(1) == GO
        return False
