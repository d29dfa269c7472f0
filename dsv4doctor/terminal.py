"""What the command line reads and writes: the report, and the progress on standard error.

rich is imported only where there is a terminal to draw on.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from typing import Any, TextIO

from dsv4doctor.errors import UsageError

# Control characters, and those that reorder what follows.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def width(is_terminal: bool) -> int:
    """The terminal's columns, else COLUMNS, else 100."""
    columns = shutil.get_terminal_size((100, 24)).columns
    if not is_terminal:
        columns = int(os.environ["COLUMNS"]) if os.environ.get("COLUMNS", "").isdigit() else 100
    return max(40, columns)


def check_writable(output: str | None, flag: str = "--output") -> None:
    """UsageError for an output file that cannot be written, before the work is done."""
    if output is None:
        return
    folder = os.path.dirname(os.path.abspath(output))
    if not os.path.isdir(folder):
        raise UsageError(f"{flag} {output}: no folder {folder}", "give another file")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"{flag} {output}: {folder} cannot be written", "give another file")


def deliver(text: str, output: str | None, flag: str = "--output") -> None:
    """To standard output, or as the file `output`, which appears whole or not at all."""
    if output is None:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    folder = os.path.dirname(os.path.abspath(output))
    try:
        handle, scratch = tempfile.mkstemp(dir=folder, prefix=".dsv4doctor-")
        try:
            with open(handle, "w", encoding="utf-8") as file:
                file.write(text)
                umask = os.umask(0)
                os.umask(umask)
                os.chmod(scratch, 0o666 & ~umask)
            os.replace(scratch, output)
        except BaseException:
            os.unlink(scratch)
            raise
    except OSError as error:
        raise UsageError(
            f"{flag} {output}: cannot be written ({error.strerror})", "give another file"
        ) from error


def say(line: str) -> None:
    print(harmless(line), file=sys.stderr)


def harmless(text: str) -> str:
    """`text` without what a terminal would obey instead of show; lines and tabs stay."""
    return _OBEYED.sub("\N{REPLACEMENT CHARACTER}", text)


def is_interactive(stream: TextIO) -> bool:
    """True where somebody watches: a terminal that can draw, and not a CI's log."""
    in_ci = os.environ.get("CI", "").lower() not in ("", "0", "false")
    return stream.isatty() and os.environ.get("TERM") != "dumb" and not in_ci


def wants_color(stream: TextIO) -> bool:
    return is_interactive(stream) and not os.environ.get("NO_COLOR")


class Progress:
    """A spinner and a download bar on standard error, where somebody watches."""

    def __enter__(self) -> Progress:
        self._bar: Any = None
        self._task: Any = None
        if is_interactive(sys.stderr):
            from rich.console import Console
            from rich.progress import BarColumn, SpinnerColumn, TextColumn
            from rich.progress import Progress as Bar

            columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=24))
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("reading the facts", total=None)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def phase(self, text: str) -> None:
        if self._bar is not None:
            self._bar.update(self._task, description=text, total=None, completed=0)

    def download(self, done: int, total: int | None) -> None:
        if self._bar is not None:
            text = f"fetching SGLang, {done / 1e6:.0f} MB"
            self._bar.update(self._task, description=text, total=total, completed=done)

    def reading(self, done: int, total: int | None) -> None:
        """`done` bytes so far of `total`; without a total, `done` more bytes."""
        if self._bar is not None and total is not None:
            text = f"reading the log, {done / 1e6:.0f} of {total / 1e6:.0f} MB"
            self._bar.update(self._task, description=text, total=total, completed=done)
