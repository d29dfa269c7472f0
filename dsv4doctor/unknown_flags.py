"""Arguments of a launch whose value only a running shell knows."""

from __future__ import annotations

from collections.abc import Sequence

from dsv4doctor.shell.scope import Field

_NAMES = (
    "--host --port --api-key --admin-api-key --served-model-name --nccl-port --dist-init-addr "
    "--random-seed --download-dir --log-level --log-level-http --log-requests --chat-template "
    "--crash-dump-folder --file-storage-path --storage-path --base-gpu-id --node-rank "
    "--disaggregation-bootstrap-port --disaggregation-ib-device --weight-version "
    "--watchdog-timeout --ssl-keyfile --ssl-certfile --collect-tokens-histogram"
)
_NO_SAY = frozenset(_NAMES.split())
"""SGLang's flags that have no part in what the layers resolve to."""


def settle(
    arguments: Sequence[Field], line: int
) -> tuple[tuple[str, ...], tuple[str, ...], list[str]]:
    """SGLang's flags, what of them cannot be known and why, and notes.

    A flag that has no part in what is looked at is left out when its value cannot be known.
    """
    flags: list[str] = []
    unknown: list[str] = []
    notes: list[str] = []
    name = ""
    for piece in arguments:
        own, equals, _ = piece.text.partition("=")
        if own.startswith("--"):
            name = own
        flags.append(piece.text)
        if piece.known:
            continue
        if name in _NO_SAY and (flags[-2:-1] == [name] or (equals and own == name)):
            del flags[-1 if equals and own == name else -2 :]
            notes.append(f"line {line}: {name} was left out ({piece.why})")
        elif own == name and not equals:
            unknown.append(f"cannot know whether {name} is given ({piece.why})")
        else:
            value = piece.text.removeprefix(f"{name}=") if equals and own == name else piece.text
            of = f", the value of {name}" if name else ""
            unknown.append(f"cannot know {value or 'the text'}{of} ({piece.why})")
    return tuple(flags), tuple(unknown), notes
