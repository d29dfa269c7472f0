"""All facts of a machine in one file, without its secrets.

`dsv4doctor snapshot` writes it on the serving machine, `--snapshot` reads it anywhere.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsv4doctor import __version__, jsonio
from dsv4doctor.errors import UsageError
from dsv4doctor.facts.files import read_json, shown
from dsv4doctor.models import Checkpoint, GpuFacts, HostFacts, Launch, SglangTree, Snapshot, Stack

REDACTED = "[redacted]"
SCHEMA = "dsv4doctor-snapshot/1"
_MAX_BYTES = 256 << 20

_RELEVANT = re.compile(
    r"(SGLANG|SGL|FLASHINFER|NCCL|CUDA|TORCH|TORCHINDUCTOR|PYTORCH|TRITON|TVM|DG|DEEP_GEMM|DEEPEP"
    r"|NVSHMEM|NVIDIA|HF|HUGGINGFACE|TRANSFORMERS|OMP|UCX|MOONCAKE|NIXL|MC|GLOO)_.*"
    r"|PYTHONPATH|VIRTUAL_ENV|LD_LIBRARY_PATH|XDG_CACHE_HOME"
)
_SECRET_WORD = re.compile(
    r".*(KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|CREDENTIALS|AUTH|COOKIE)"
)
_SECRET_IN_JSON = re.compile(
    r'("[^"]*(?:key|token|secret|password|credential)"\s*:\s*)"[^"]*"', re.IGNORECASE
)
_URL_USER = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/@\s]+@", re.IGNORECASE)
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_SECRET_FLAGS = ("--api-key", "--admin-api-key")


def take(
    *,
    gpu: GpuFacts,
    sglang: SglangTree | None,
    stack: Stack | None,
    checkpoint: Checkpoint | None,
    launch: Launch | None,
    environment: Mapping[str, str],
    host: HostFacts | None = None,
) -> Snapshot:
    """The facts as one Snapshot: variables that matter only, secrets redacted."""
    return Snapshot(
        tool_version=__version__,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        gpu=gpu,
        sglang=sglang,
        stack=stack,
        checkpoint=checkpoint,
        launch=redacted_launch(launch) if launch else None,
        environment=redacted_environment(environment),
        host=host,
    )


def text_of(snapshot: Snapshot) -> str:
    text = jsonio.dump({"schema": SCHEMA, **jsonio.to_plain(snapshot)})
    # A variable or path of other bytes than UTF-8 would make a file that is refused elsewhere.
    return text.encode("utf-8", "replace").decode()


def read_snapshot(path: Path) -> Snapshot:
    """The Snapshot in `path`; UsageError names what does not fit."""
    hint = "write one with: dsv4doctor snapshot -o FILE"
    plain = read_json(path, _MAX_BYTES, hint)
    if not isinstance(plain, dict) or "schema" not in plain:
        raise UsageError(f"{path}: not a snapshot of dsv4doctor", hint)
    schema = plain.pop("schema")
    if schema != SCHEMA:
        raise UsageError(f"{path}: schema {schema!r}, this dsv4doctor reads {SCHEMA!r}", hint)
    for where, problem in _unusable_text(plain):
        raise UsageError(f"{path}: {where}: {problem}", hint)
    snapshot = jsonio.from_plain(plain, Snapshot, str(path))
    launch = snapshot.launch.environment if snapshot.launch else {}
    for where, environment in (("environment", snapshot.environment), ("launch", launch)):
        for name in environment:
            if not name or "=" in name:
                raise UsageError(f"{path}: {where}: {shown(name)!r} is no variable's name", hint)
    return snapshot


def _unusable_text(value: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Where in parsed JSON there is text that no process can be given, and why."""
    if isinstance(value, str):
        if "\0" in value:
            yield where, "a NUL character"
        elif not value.isascii() and _LONE_SURROGATE.search(value):
            yield where, "not valid Unicode text"
    elif isinstance(value, dict):
        for name, item in value.items():
            place = f"{where}.{shown(name)}" if where else shown(name)
            yield from _unusable_text(name, place)
            yield from _unusable_text(item, place)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _unusable_text(item, f"{where}[{index}]")


# ------------------------------------------------------------------------------ secrets


def looks_secret(name: str) -> bool:
    """True for the name of a variable or flag that holds a secret, e.g. HF_TOKEN or --api-key."""
    words = re.split(r"[-_.]+", name.strip("-").upper())
    return any(_SECRET_WORD.fullmatch(word) for word in words)


def redacted_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that have a part in serving, secret values replaced."""
    return {
        name: REDACTED if looks_secret(name) else redacted_text(value)
        for name, value in sorted(environment.items())
        if _RELEVANT.fullmatch(name)
    }


def redacted_flags(flags: Sequence[str]) -> tuple[str, ...]:
    """`flags` with the values of --api-key and its like replaced."""
    result: list[str] = []
    secret = False
    for flag in flags:
        name, equals, _ = flag.partition("=")
        if secret and not flag.startswith("--"):
            result.append(REDACTED)
        elif flag.startswith("--") and _is_secret_flag(name) and equals:
            result.append(f"{name}={REDACTED}")
        else:
            result.append(redacted_text(flag))
        secret = flag.startswith("--") and _is_secret_flag(name) and not equals
    return tuple(result)


def _is_secret_flag(name: str) -> bool:
    # argparse takes any unambiguous beginning of a flag's name.
    shortened = len(name) > 5 and any(full.startswith(name) for full in _SECRET_FLAGS)
    return shortened or looks_secret(name)


def redacted_launch(launch: Launch) -> Launch:
    return replace(
        launch,
        environment=redacted_environment(launch.environment),
        flags=redacted_flags(launch.flags),
        configured=redacted_flags(launch.configured),
    )


def redacted_text(text: str) -> str:
    """`text` without the user part of URLs and without secrets in JSON."""
    return _SECRET_IN_JSON.sub(rf'\1"{REDACTED}"', _URL_USER.sub(r"\1", text))


def usable_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """A snapshot's variables without the redacted ones, and none that tells Python what to run."""
    return {
        name: value
        for name, value in environment.items()
        if value != REDACTED and not name.startswith(("PYTHON", "LD_"))
    }
