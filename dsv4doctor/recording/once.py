"""Wraps a method of one object until its first call has been looked at, and not a call longer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from dsv4doctor.recording.observer import ServerCalls, profiled
from dsv4doctor.recording.plugin import complain, guarded, stopped

Wanted = Callable[[tuple[Any, ...], dict[str, Any]], bool]
Done = Callable[[ServerCalls, tuple[Any, ...], dict[str, Any]], bool]


def observe(owner: Any, name: str, done: Done, wanted: Wanted | None = None) -> None:
    """Observe calls of `owner.name` for which `wanted(args, kwargs)`, until `done` says enough.

    `done(calls, args, kwargs)` returns True to take the wrapper off.  Whatever goes wrong in
    here takes it off too; what the method returns or raises is passed on unchanged.
    """
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if stopped():
            guarded(take_off)
            return original(*args, **kwargs)
        if profiled() or (wanted is not None and not guarded(wanted, args, kwargs)):
            return original(*args, **kwargs)
        returned: list[Any] = []
        try:
            calls = ServerCalls(lambda: returned.append(original(*args, **kwargs)))
        except Exception as error:  # what the method raises is in calls.error
            complain(error)
            return returned[0] if returned else original(*args, **kwargs)
        if stopped() or guarded(done, calls, args, kwargs) is not False:
            guarded(take_off)
        if calls.error is not None:
            raise calls.error
        return returned[0]

    def take_off() -> None:
        if owner.__dict__.get(name) is wrapper:
            del owner.__dict__[name]

    owner.__dict__[name] = wrapper
