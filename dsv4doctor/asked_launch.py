"""The launch that was asked for, and the folder of its model."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath

from dsv4doctor import jsonio
from dsv4doctor.asked import Options, env_pairs
from dsv4doctor.errors import UsageError
from dsv4doctor.facts.checkpoint import materialise, resolve_model
from dsv4doctor.facts.snapshot import usable_environment
from dsv4doctor.flags import MODEL_FLAGS, flag_value
from dsv4doctor.launch import from_arguments, read_script
from dsv4doctor.launch_limits import check_limits
from dsv4doctor.models import Checkpoint, Launch, Snapshot
from dsv4doctor.server_config import flags_of

_LINE = re.compile("[0-9]{1,9}")


def launch_of(options: Options, saved: Snapshot | None, environment: Mapping[str, str]) -> Launch:
    given = env_pairs(options.env)
    if options.launch is not None and options.flags:
        raise UsageError(
            "--launch and SGLang flags after `--` are both given", "give one of the two"
        )
    if options.launch is not None:
        path, line = _script(options.launch)
        launch = read_script(path, {**environment, **given}, line, given)
    elif saved is not None and saved.launch is not None and not options.flags:
        launch = replace(saved.launch, environment=usable_environment(saved.launch.environment))
    else:
        launch = from_arguments(options.model, options.flags, {})
    launch = _with_configuration(launch)
    if options.model is not None:
        launch = replace(launch, model=options.model)
    elif launch.model is None and _unknown_model(launch) is None:
        launch = _with_configured_model(launch)
    environment = {**launch.environment, **given}
    return replace(launch, environment=environment, given=tuple(given))


def _unknown_model(launch: Launch) -> str | None:
    """What is not known of the model that the script names; None: it names none, or it is known."""
    said = (note.partition(": ")[2] for note in launch.notes if note.startswith("line "))
    return next((text for text in said if text.startswith("cannot know the model")), None)


def _with_configuration(launch: Launch) -> Launch:
    """`launch` with what its --config file says; what of it cannot be read is SGLang's to say."""
    named = flag_value(launch.flags, "--config")
    if named is None or not os.path.isfile(named):
        return launch
    check_limits(launch)
    return replace(launch, configured=flags_of(Path(named)))


def _with_configured_model(launch: Launch) -> Launch:
    """`launch` with the model of its --config file; a flag would count more."""
    model = next((m for name in MODEL_FLAGS if (m := flag_value(launch.configured, name))), None)
    if model is None:
        return launch
    note = f"the model is what --config {flag_value(launch.flags, '--config')} names"
    return replace(launch, model=model, notes=(*launch.notes, note))


def refuse_unknown(launch: Launch) -> None:
    """UsageError for a launch of which not every argument is known: a guess helps nobody."""
    if launch.unknown:
        more = f", and {len(launch.unknown) - 1} more" if len(launch.unknown) > 1 else ""
        at = f":{launch.line}" if launch.line else ""
        raise UsageError(
            f"{launch.source}{at}: {launch.unknown[0]}{more}",
            "write the value into the script, give a variable of it with --env NAME=VALUE, or "
            "give SGLang's flags after `--`",
        )


def _script(named: Path) -> tuple[Path, int | None]:
    text, colon, number = str(named).rpartition(":")
    if colon and _LINE.fullmatch(number) and not os.path.exists(named):
        return Path(text), int(number)
    return named, None


def model_path_of(
    options: Options,
    launch: Launch,
    environment: Mapping[str, str],
    saved: Snapshot | None = None,
) -> Path:
    """The folder of the launch's model on this machine."""
    if launch.model is None:
        raise no_model(options, launch)
    try:
        return resolve_model(
            launch.model,
            {**environment, **launch.environment},
            flag_value(launch.all_flags, "--revision"),
        )
    except UsageError as error:
        if saved is None or saved.checkpoint is None or options.model is not None:
            raise
        raise UsageError(
            f"{launch.source}: {error.message}, and {options.snapshot} is of another model, "
            f"{saved.checkpoint.name}",
            "take the snapshot with this launch: dsv4doctor snapshot --launch FILE -o FILE",
        ) from error


def no_model(options: Options, launch: Launch) -> UsageError:
    config = flag_value(launch.flags, "--config")
    if options.launch is not None or config is not None:
        unknown = _unknown_model(launch)
        if unknown is not None:
            return UsageError(
                f"{launch.source}:{launch.line}: {unknown}",
                "give it as MODEL, or a variable of it with --env NAME=VALUE",
            )
        beside = f", nor does --config {config}" if config is not None else ""
        return UsageError(
            f"{launch.source}: names no model{beside}",
            "give it as MODEL: a checkpoint folder or a Hugging Face id",
        )
    model = "give a checkpoint folder or a Hugging Face id as MODEL"
    if not options.takes_launch:
        where = f"{options.snapshot}: has no model, and " if options.snapshot is not None else ""
        return UsageError(f"{where}no MODEL given", model)
    script = "the script that starts the server (--launch serve.sh)"
    return UsageError("no MODEL and no --launch given", f"{model}, or {script}")


def saved_checkpoint(options: Options, saved: Snapshot | None, launch: Launch) -> Checkpoint | None:
    """The snapshot's, unless the command line or a script names another model."""
    if saved is None or saved.checkpoint is None or options.model is not None:
        return None
    kept, own = saved.checkpoint, saved.launch.model if saved.launch else None
    if launch.model is None or launch.model == own:
        return kept
    # Elsewhere the same checkpoint may lie in another folder, or go by its id.
    names = {PurePosixPath(name).name for name in (own, kept.path, kept.name) if name}
    return kept if PurePosixPath(launch.model).name in names else None


def materialised(checkpoint: Checkpoint, cache: Path) -> Path:
    """A snapshot's checkpoint as header-only files in our cache, by its content.

    By what the snapshot says now: its own key is of the files that it was taken from.
    """
    content = json.dumps(jsonio.to_plain(checkpoint), sort_keys=True).encode()
    target = cache / "snapshots" / hashlib.sha256(content).hexdigest()[:32]
    if os.path.isdir(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, ignore_cleanup_errors=True) as scratch:
            folder = materialise(checkpoint, Path(scratch) / "checkpoint")
            try:
                os.rename(folder, target)
            except OSError:
                if not os.path.isdir(target):  # else another process was first
                    raise
    except OSError as error:
        raise UsageError(
            f"{target}: cannot be written ({error.strerror})",
            "set DSV4DOCTOR_CACHE to a folder that can",
        ) from error
    return target
