"""Where dsv4doctor keeps what has to last: journals of patched trees, stamps of verified kernels.

A patched SGLang asks here too, in environments that have little else of ours.
"""

from __future__ import annotations

import os
from pathlib import Path

from dsv4doctor.errors import UsageError

STATE_VARIABLE = "DSV4DOCTOR_STATE"


def state_folder() -> Path:
    """$DSV4DOCTOR_STATE, with ~ for a home; else the user's state folder.

    Raises UsageError for the home of nobody.
    """
    chosen = os.environ.get(STATE_VARIABLE)
    if not chosen:
        import platformdirs

        return Path(platformdirs.user_state_path("dsv4doctor"))
    folder = os.path.expanduser(chosen)
    if folder.startswith("~"):
        raise UsageError(f"{STATE_VARIABLE} {chosen}: no such user", "set it to a folder")
    return Path(folder)
