"""Reading a whole log, and going on to trace the launch it belongs to."""

from __future__ import annotations

from collections.abc import Callable

from dsv4doctor.diagnose.judge import Diagnosis, judge
from dsv4doctor.diagnose.reader import Progress, Source
from dsv4doctor.diagnose.scan import Scanner
from dsv4doctor.diagnose.signature import signatures
from dsv4doctor.errors import UsageError
from dsv4doctor.flags import flag_value, without
from dsv4doctor.models import Launch, Report

_DRAFT = "--speculative-draft-model-path"


def diagnose(name: str, arch: str | None = None, progress: Progress | None = None) -> Diagnosis:
    """What the log `name` ("-": standard input) says; `arch` as the user knows it.

    Raises UsageError naming the file when it cannot be read or is not a text log.
    """
    scanner = Scanner(signatures())
    with Source(name, progress) as source:
        for chunk in source.chunks():
            scanner.feed(chunk)
        return judge(scanner.finish(), source.name, arch, source.notes)


def check_launch(
    diagnosis: Diagnosis,
    *,
    model: str | None,
    sglang: str | None,
    python: str | None,
    arch: str | None,
    env: tuple[str, ...],
    timeout: float,
    download: Callable[[int, int | None], None] | None = None,
    phase: Callable[[str], None] | None = None,
) -> Report:
    """`check`'s report on the very launch that the log names.

    Raises UsageError when the log names no launch or its model is not on this machine.
    """
    from dsv4doctor.asked import Options
    from dsv4doctor.audit import Settings, audit
    from dsv4doctor.target import resolve

    found = diagnosis.launch
    if found is None:
        raise UsageError(
            f"{diagnosis.source}: no server_args= line and no launch command to trace",
            "give the log from the server's start, or use `dsv4doctor check --launch serve.sh`",
        )
    options = Options(
        model=model or found.launch.model,
        flags=_flags(found.launch),
        sglang=sglang,
        python=python,
        arch=arch or diagnosis.facts.arch or "auto",
        env=env,
    )
    return audit(resolve(options, download), Settings(timeout=timeout), phase)


def _flags(launch: Launch) -> tuple[str, ...]:
    """The launch's flags.  A draft of the model's own folder is not named: SGLang takes that
    without the flag, which it logs all the same, and here the folder may be another one."""
    if launch.model is None or flag_value(launch.flags, _DRAFT) != launch.model:
        return launch.flags
    return without(launch.flags, (_DRAFT,))
