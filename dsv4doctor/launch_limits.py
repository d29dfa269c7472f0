"""Launches that no server has: refused at once, where SGLang would work on them for minutes."""

from __future__ import annotations

import os
import re
from pathlib import Path

from dsv4doctor.errors import UsageError
from dsv4doctor.flags import flag_value
from dsv4doctor.models import Launch

_MOST_FLAGS = 2000
_MOST_CHARACTERS = 1 << 18
_CONFIG_BYTES = 1 << 20
_MOST_ALIASES = 16
_ALIAS = re.compile(rb"(?:^|[\s,\[{:-])\*[\w-]", re.MULTILINE)


def check_limits(launch: Launch) -> None:
    """UsageError for more flags than a command has, and for a --config file that is a trap."""
    size = sum(len(flag) for flag in launch.flags)
    if len(launch.flags) > _MOST_FLAGS or size > _MOST_CHARACTERS:
        raise UsageError(
            f"{launch.source}: {len(launch.flags)} arguments with {size} characters",
            f"a launch has at most {_MOST_FLAGS} arguments and {_MOST_CHARACTERS >> 10} KiB",
        )
    named = flag_value(launch.flags, "--config")
    if named is None or not os.path.isfile(named):
        return  # what SGLang says about a missing file is clear
    try:
        with Path(named).open("rb") as file:
            content = file.read(_CONFIG_BYTES + 1)
    except OSError as error:
        raise UsageError(f"--config {named}: cannot be read ({error.strerror})") from error
    if len(content) > _CONFIG_BYTES:
        raise UsageError(f"--config {named}: larger than 1 MiB", "SGLang's options go there")
    if len(_ALIAS.findall(content)) > _MOST_ALIASES:
        raise UsageError(
            f"--config {named}: more than {_MOST_ALIASES} YAML aliases",
            "write the values out: aliases of aliases can grow without end",
        )
