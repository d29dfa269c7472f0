"""What the user asked for, as said."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dsv4doctor.errors import UsageError


@dataclass(frozen=True)
class Options:
    """What the user said, as said."""

    model: str | None = None
    flags: tuple[str, ...] = ()
    """SGLang's, after `--`."""
    launch: Path | None = None
    """A script, or `script:LINE` where it holds several SGLang commands."""
    snapshot: Path | None = None
    sglang: str | None = None
    """A folder or a version."""
    python: str | None = None
    arch: str = "auto"
    env: tuple[str, ...] = ()
    """KEY=VALUE each."""
    level: str = "quick"
    """"full": also measure on this machine's GPUs."""
    takes_launch: bool = True
    """The command has --launch."""


def env_pairs(texts: Sequence[str]) -> dict[str, str]:
    """What each --env, a KEY=VALUE, says; UsageError for one that is none."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier() or "\0" in value:
            said = re.split(r"[=\s]", text, maxsplit=1)[0]  # the rest may be a secret
            raise UsageError(f"--env {said}...: not KEY=VALUE", "write it like --env SGLANG_X=1")
        found[name] = value
    return found
