"""SGLang's flags as a user wrote them."""

from __future__ import annotations

from collections.abc import Sequence

MAIN_FLAG = "--moe-runner-backend"
DRAFT_FLAG = "--speculative-moe-runner-backend"


def flag_value(flags: Sequence[str], name: str) -> str | None:
    """The value of the flag `name`; the last one counts."""
    value = None
    for index, flag in enumerate(flags):
        if flag == name and index + 1 < len(flags):
            value = flags[index + 1]
        elif flag.startswith(f"{name}="):
            value = flag.partition("=")[2]
    return value


def without(flags: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """`flags` without the named ones and their values."""
    kept: list[str] = []
    dropping = False
    for flag in flags:
        if flag.startswith("--"):
            dropping = flag.partition("=")[0] in names
        if not dropping:
            kept.append(flag)
    return tuple(kept)


def without_speculation(flags: Sequence[str]) -> tuple[str, ...]:
    names = [flag.partition("=")[0] for flag in flags if flag.startswith("--speculative-")]
    return without(flags, names)
