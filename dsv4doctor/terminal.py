"""What the command line reads and writes: the report, and the progress on standard error.

rich is imported only where there is a terminal to draw on.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import os
import re
import shutil
import stat
import sys
import tempfile
import textwrap
from typing import Any, TextIO

from dsv4doctor.errors import UsageError
from dsv4doctor.outputs import refuse_place

# Control characters, and those that reorder what follows.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


_COLUMNS = re.compile("[1-9][0-9]{0,3}")
_ESCAPED = "dsv4doctor.escaped"


def _escape(error: UnicodeError) -> tuple[str, int]:
    """What an encoding cannot say, as in JSON: \\u00e9, and a pair of those above U+FFFF."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass")
    pairs = (units[at : at + 2].hex() for at in range(0, len(units), 2))
    return "".join(f"\\u{unit}" for unit in pairs), error.end


codecs.register_error(_ESCAPED, _escape)


def prepare() -> None:
    """Standard streams that are all there and take any text, and a terminal size that is one.

    For the start of a process: a stream that was closed goes nowhere, so that no file opened
    later takes its place.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, this one
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper) and isinstance(sys.stdout.buffer, io.RawIOBase):
        # PYTHONUNBUFFERED: what a full disk does not take would be left out without a word.
        sys.stdout = open(1, "w", encoding=sys.stdout.encoding, closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_ESCAPED)
    for variable in ("COLUMNS", "LINES"):  # rich believes any digit
        if not _COLUMNS.fullmatch(os.environ.get(variable, "1")):
            del os.environ[variable]


def width(is_terminal: bool) -> int:
    """The terminal's columns, else COLUMNS, else 100."""
    columns = shutil.get_terminal_size((100, 24)).columns
    if not is_terminal:
        said = os.environ.get("COLUMNS", "")
        columns = int(said) if _COLUMNS.fullmatch(said) else 100
    return min(max(40, columns), 9999)


def wrapped(text: str, columns: int) -> str:
    """`text` with its lines cut to `columns`; a word that is longer, and a command, stay whole."""
    lines: list[str] = []
    for line in text.splitlines():
        start = line[: len(line) - len(line.lstrip())]
        if len(line) <= columns or line.lstrip().startswith("$ "):
            lines.append(line)
            continue
        lines += textwrap.wrap(
            line,
            columns,
            subsequent_indent=start,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines) + "\n"


def check_writable(output: str | None, flag: str = "--output") -> None:
    """UsageError for an output file that cannot be written, or that would be written into a
    checkpoint or an SGLang tree, before the work is done."""
    if output is None:
        return
    if not output:
        raise UsageError(f"{flag}: empty", "leave it out, or give a file")
    refuse_place(output, flag)
    hint = "give another file"
    if os.path.isdir(output):
        raise UsageError(f"{flag} {output}: a folder", hint)
    try:
        in_place = _is_special(output)
    except OSError as error:
        raise _unwritable(output, flag, error) from error
    if in_place:
        if not os.access(output, os.W_OK):
            raise UsageError(f"{flag} {output}: cannot be written (Permission denied)", hint)
        return
    folder = os.path.dirname(os.path.realpath(output))
    if not os.path.isdir(folder):
        raise UsageError(f"{flag} {output}: no folder {folder}", hint)
    if not can_be_written(folder):
        raise UsageError(f"{flag} {output}: {folder} cannot be written", hint)


def can_be_written(folder: str) -> bool:
    """Whether a file can be made in `folder`: asked by making one, as root's rights say nothing
    of /proc or a full disk."""
    try:
        handle, scratch = tempfile.mkstemp(dir=folder, prefix=".dsv4doctor-")
        os.close(handle)
        os.unlink(scratch)
    except OSError:
        return False
    return True


def deliver(text: str, output: str | None, flag: str = "--output") -> None:
    """To standard output, or as the file `output`, which appears whole or not at all.

    A link stays and the file it points at is replaced; a device or pipe is written to.  Raises
    UsageError for what cannot be written, BrokenPipeError when the reader of standard output left.
    """
    if output is None:
        _print(text)
        return
    content = text.encode("utf-8", _ESCAPED)
    try:
        if _is_special(output):
            _write_in_place(content, output)
        else:
            _replace(content, os.path.realpath(output))
    except OSError as error:
        raise _unwritable(output, flag, error) from error


def silence(stream: TextIO) -> None:
    """What `stream` still holds goes nowhere, so that the interpreter's last flush succeeds."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def full_output(error: OSError) -> UsageError:
    """For an `error` of writing standard output, which is silenced."""
    silence(sys.stdout)
    reason = (error.strerror or str(error)).lower()
    return UsageError(f"standard output: {reason}", "redirect it to somewhere that can be written")


def _print(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise full_output(error) from error


def _is_special(output: str) -> bool:
    """True for a device, pipe or socket."""
    try:
        return not stat.S_ISREG(os.stat(output).st_mode)
    except FileNotFoundError:
        return False


def _write_in_place(content: bytes, output: str) -> None:
    # Without O_NONBLOCK a pipe that nobody reads would be waited for without end.
    handle = os.open(output, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    os.set_blocking(handle, True)
    with open(handle, "wb") as file:
        file.write(content)


def _replace(content: bytes, target: str) -> None:
    handle, scratch = tempfile.mkstemp(dir=os.path.dirname(target), prefix=".dsv4doctor-")
    try:
        with open(handle, "wb") as file:
            file.write(content)
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(scratch, 0o666 & ~umask)
        os.replace(scratch, target)
    except BaseException:
        os.unlink(scratch)
        raise


def _unwritable(output: str, flag: str, error: OSError) -> UsageError:
    reason = "a pipe that nobody reads" if error.errno == errno.ENXIO else error.strerror
    named = output if len(output) <= 500 else f"{output[:100]}..."
    return UsageError(f"{flag} {named}: cannot be written ({reason})", "give another file")


def say(line: str) -> None:
    """A line on standard error, where that can be written."""
    try:
        print(harmless(line), file=sys.stderr, flush=True)
    except OSError:
        silence(sys.stderr)


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

    def reading(self, done: int, total: int | None, what: str = "the log") -> None:
        """`done` bytes so far of `total`; without a total, `done` more bytes."""
        if self._bar is not None and total is not None:
            text = f"reading {what}, {done / 1e6:.0f} of {total / 1e6:.0f} MB"
            self._bar.update(self._task, description=text, total=total, completed=done)
