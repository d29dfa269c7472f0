"""Where dsv4doctor keeps what has to last: journals of patched trees, stamps of verified kernels.

A patched SGLang asks here too, in environments that have little else of ours.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from dsv4doctor.errors import UsageError

STATE_VARIABLE = "DSV4DOCTOR_STATE"


def state_folder() -> Path:
    """$DSV4DOCTOR_STATE, with ~ for a home; else the user's state folder.

    Raises UsageError for the home of nobody, and for a user without one.
    """
    chosen = os.environ.get(STATE_VARIABLE)
    if not chosen:
        import platformdirs

        with contextlib.suppress(RuntimeError):
            folder = Path(platformdirs.user_state_path("dsv4doctor"))
            if folder.is_absolute():
                return folder
        raise UsageError(
            "this user has no home folder", f"set HOME, or {STATE_VARIABLE} to a folder"
        )
    named = os.path.expanduser(chosen)
    if named.startswith("~"):
        raise UsageError(f"{STATE_VARIABLE} {chosen}: no such user", "set it to a folder")
    return Path(named)
