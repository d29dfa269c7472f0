"""Errors that the command line turns into one line and a way out."""

import re

_LONG_WORD = re.compile(r"\S{301,}")
_LONGEST = 2000


class DoctorError(Exception):
    """Something that stops the run; `message` names the file or flag, `hint` the way out.

    The command line prints `message`, then `hint`, and exits with `exit_code`; a traceback is
    never shown.
    """

    exit_code = 3

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = shortened(message)
        self.hint = None if hint is None else shortened(hint)


def shortened(text: str) -> str:
    """`text` with very long words cut in the middle, and at its end where it is long itself."""
    words = _LONG_WORD.sub(lambda match: f"{match[0][:200]}...{match[0][-60:]}", text)
    return words if len(words) <= _LONGEST else words[:_LONGEST] + "..."


def cut(text: str, most: int) -> str:
    """`text`; where it is longer than `most` characters, up to its last whole word, and "..."."""
    if len(text) <= most:
        return text
    words, _, rest = text[: most + 1].rpartition(" ")
    is_one_word = len(rest) > most // 2
    return (text[:most] if is_one_word else words).rstrip(" .,;:") + "..."


class UsageError(DoctorError):
    """Wrong usage or unreadable input: exit code 2."""

    exit_code = 2


class UndeterminedError(DoctorError):
    """The answer could not be determined (the trace failed, a rule crashed): exit code 3."""

    exit_code = 3


class PatchRefusedError(DoctorError):
    """A patch was refused: exit code 4."""

    exit_code = 4
