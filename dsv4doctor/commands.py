"""What a reader can run, or change in the launch they have."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence

from dsv4doctor.facts.snapshot import REDACTED
from dsv4doctor.models import Facts, Launch

_COMMAND_LINE = "command line"


def server_command(facts: Facts, flags: Sequence[str]) -> str | None:
    """The launch with `flags` instead of its own, as a shell line.

    None where it is a script's, whose other lines would be lost, or holds a secret that is not
    known here.
    """
    launch, checkpoint = facts.snapshot.launch, facts.snapshot.checkpoint
    if launch is not None and launch.source != _COMMAND_LINE:
        return None
    environment = launch.environment if launch else {}
    model = launch.model if launch and launch.model else checkpoint.path if checkpoint else "MODEL"
    words = [*(f"{name}={value}" for name, value in environment.items())]
    words = [*(["env", *words] if words else [])]
    words += ["python", "-m", "sglang.launch_server", "--model-path", model, *flags]
    return None if _is_secret(words) else shlex.join(words)


def launch_change(facts: Facts, flags: Sequence[str]) -> str | None:
    """What to change in the user's script so that its flags are `flags`; None: it is no script."""
    launch = facts.snapshot.launch
    if launch is None or launch.source == _COMMAND_LINE:
        return None
    before, after = _options(launch.flags), _options(flags)
    replaced = [
        f"{_said(name, after[name])} in place of {_said(name, values)}"
        for name, values in before.items()
        if name in after and after[name] != values
    ]
    added = [_said(name, values) for name, values in after.items() if name not in before]
    removed = [_said(name, values) for name, values in before.items() if name not in after]
    parts = [f"write {text}" for text in replaced]
    parts += [f"add {', '.join(added)}"] if added else []
    parts += [f"take out {', '.join(removed)}"] if removed else []
    return f"In {_place(launch)}: {'; '.join(parts)}." if parts else None


def doctor_command(facts: Facts, *words: str) -> str | None:
    """`dsv4doctor WORDS` on the very same launch, tree and GPU; None: not known how."""
    launch, trace, before = facts.snapshot.launch, facts.trace, facts.said
    if launch is None or trace is None:
        return None
    is_saved = before.saved_flags is not None
    if is_saved and launch.configured and launch.flags != before.saved_flags:
        return None  # its --config file is on another machine
    said = ["dsv4doctor", *words, *_named(facts, launch)]
    anew = launch.flags != before.saved_flags if is_saved else launch.source == _COMMAND_LINE
    after = ["--", *launch.flags] if anew and launch.flags else []
    for name in launch.environment if is_saved and anew else launch.given:
        said += ["--env", f"{name}={launch.environment.get(name, '')}"]
    if facts.arch_source == "--arch":
        said += ["--arch", facts.arch.name]
    if trace.sglang.borrowed:
        is_wheel = trace.sglang.origin == "wheel"
        said += ["--sglang", trace.sglang.version if is_wheel else trace.sglang.root]
    python = _python(facts, launch)
    if python is not None:
        said += ["--python", python]
    said += after
    return None if _is_secret(said) else shlex.join(said)


def is_for_another_machine(facts: Facts) -> bool:
    """--arch names a GPU that the machine of the snapshot has not got."""
    there = {gpu.arch for gpu in facts.snapshot.gpu.gpus}
    return facts.said.snapshot is not None and bool(there) and facts.arch not in there


def _named(facts: Facts, launch: Launch) -> list[str]:
    """The words that name the launch, without its flags."""
    said = facts.said
    snapshot = ["--snapshot", said.snapshot] if said.snapshot is not None else []
    model = [said.model] if said.model is not None else []
    if said.saved_flags is not None:
        return [*snapshot, *model]
    if launch.source != _COMMAND_LINE:
        return [*snapshot, "--launch", _place(launch), *model]
    if snapshot:
        return [*snapshot, *model]
    return [launch.model or "MODEL"]


def _python(facts: Facts, launch: Launch) -> str | None:
    """The --python that was given, or that the stack was read with where that says it all."""
    stack = facts.snapshot.stack
    if facts.said.snapshot is not None or stack is None:
        return facts.said.python
    others = (launch.interpreter, sys.executable)
    known = os.sep not in stack.interpreter or stack.interpreter in others
    return None if known else stack.interpreter


def _is_secret(words: Sequence[str]) -> bool:
    return any(REDACTED in word for word in words)


def _place(launch: Launch) -> str:
    return f"{launch.source}:{launch.line}" if launch.line else launch.source


def _options(flags: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Option -> its values, `--name=value` taken apart."""
    found: dict[str, tuple[str, ...]] = {}
    name = ""
    for flag in flags:
        if flag.startswith("--"):
            name, equals, value = flag.partition("=")
            found[name] = (value,) if equals else ()
        else:
            found[name] = (*found.get(name, ()), flag)
    return found


def _said(name: str, values: Sequence[str]) -> str:
    return shlex.join(word for word in (name, *values) if word)
