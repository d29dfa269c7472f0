"""Ports that nobody else of the plan, or of this machine, has."""

from __future__ import annotations

import socket
from collections.abc import Callable

from dsv4doctor.errors import UsageError

_HIGHEST = 65535
_TRIES = 200


class Allotment:
    """Gives every port once.

    `is_busy` says whether something on the serving machine has a port already; None: another
    machine is planned for, and its ports cannot be asked about.
    """

    def __init__(self, is_busy: Callable[[int], bool] | None) -> None:
        self._is_busy = is_busy
        self._given: dict[int, str] = {}
        self.moved: list[str] = []
        """What did not get the port that it would have had."""

    def exactly(self, port: int, flag: str) -> int:
        """The port that the user asked for with `flag`; UsageError where it is taken."""
        if port in self._given:
            raise UsageError(
                f"{flag} {port}: the plan already uses it ({self._given[port]})",
                "give another port",
            )
        if self._is_busy is not None and self._is_busy(port):
            raise UsageError(
                f"{flag} {port}: something on this machine already listens there",
                "give another port, or stop what has it",
            )
        self._given[port] = flag
        return port

    def near(self, port: int, what: str) -> int:
        """`port`, or the next free one above it."""
        for candidate in range(port, min(port + _TRIES, _HIGHEST + 1)):
            busy = self._is_busy is not None and self._is_busy(candidate)
            if candidate not in self._given and not busy:
                self._given[candidate] = what
                if candidate != port:
                    self.moved.append(f"{what} is on port {candidate}: {port} is taken")
                return candidate
        raise UsageError(
            f"no free port for {what} from {port} on", "say where to begin with --port-base"
        )


def listening(port: int) -> bool:
    """True where this machine does not let a server listen on `port`."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return True
    return False
