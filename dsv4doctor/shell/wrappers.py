"""What stands in front of a command: `env`, `numactl`, `docker run`, `srun` and the like."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from dsv4doctor.models.facts import CONTAINERS

_NAMES = (
    "exec nohup setsid command env sudo nice ionice chrt numactl taskset timeout stdbuf unbuffer "
    "time flock setarch torchrun srun sbatch salloc mpirun mpiexec docker podman nerdctl "
    "apptainer singularity enroot kubectl ssh bash sh zsh dash su tmux screen systemd-run uv "
    "poetry pixi conda mamba micromamba nsys ncu strace gdb py-spy catchsegv bwrap"
)
_WRAPPERS = frozenset(_NAMES.split())
_NODE_OPTIONS = ("--cpunodebind", "-N", "--membind", "-m", "--preferred", "-p")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


@dataclass
class Surroundings:
    """What a command's wrappers do to it."""

    environment: dict[str, str]
    wrappers: tuple[str, ...] = ()
    """Their names, outermost first."""
    container: bool = False
    volumes: list[tuple[str, str]] = field(default_factory=list)
    """(path inside, path outside) of a container."""
    notes: list[str] = field(default_factory=list)
    numa_nodes: tuple[int, ...] = ()
    """What numactl binds CPUs or memory to."""
    devices: tuple[str, ...] = ()
    """The GPUs that a container is given by name."""


def unwrap(
    words: Sequence[str], environment: Mapping[str, str], inherited: Mapping[str, str]
) -> Surroundings:
    """What `words`, everything in front of a command, means for it.

    `environment` is what the script exports; `inherited` is looked at for `docker -e NAME`.
    The first word is a wrapper whatever its name is, and so is each later known name.
    """
    around = Surroundings(dict(environment))
    starts = [
        index
        for index, word in enumerate(words)
        if index == 0 or (PurePosixPath(word).name in _WRAPPERS and words[index - 1] != "--name")
    ]
    for number, start in enumerate(starts):
        end = starts[number + 1] if number + 1 < len(starts) else len(words)
        name, options = PurePosixPath(words[start]).name, words[start + 1 : end]
        around.wrappers += (name,)
        if name in CONTAINERS:
            _container(around, options, inherited)
        elif name in ("env", "sudo"):
            _env(around, options)
        elif name in ("srun", "sbatch", "mpirun", "mpiexec"):
            _cluster(around, options)
        elif name == "numactl":
            around.numa_nodes = _numactl(options)
    return around


def _env(around: Surroundings, options: Sequence[str]) -> None:
    for index, option in enumerate(options):
        match = _ASSIGNMENT.fullmatch(option)
        if match:
            around.environment[match[1]] = match[2]
        elif option in ("-i", "-", "--ignore-environment"):
            around.environment.clear()
        elif option.startswith("--unset="):
            around.environment.pop(option[8:], None)
        elif index and options[index - 1] in ("-u", "--unset"):
            around.environment.pop(option, None)


def _container(around: Surroundings, options: Sequence[str], inherited: Mapping[str, str]) -> None:
    """A container sees none of the script's variables, only those of -e and --env."""
    exported = dict(around.environment)
    outside = {**inherited, **exported}
    around.environment.clear()
    around.container = True
    for index, option in enumerate(options):
        following = options[index + 1] if index + 1 < len(options) else ""
        if option in ("-e", "--env"):
            _pass_on(around, following, outside)
        elif option.startswith("--env="):
            _pass_on(around, option[6:], outside)
        elif re.match(r"-e[A-Za-z_]\w*(=|$)", option):
            _pass_on(around, option[2:], outside)
        elif option == "--gpus":
            around.devices = _devices(following)
        elif option.startswith("--gpus="):
            around.devices = _devices(option[7:])
        elif option.startswith("--env-file"):
            around.notes.append(f"{option.split('=')[0]} was not read")
        elif option in ("-v", "--volume"):
            _volume(around, following)
        elif option.startswith("--volume="):
            _volume(around, option[9:])
        elif option.startswith("--mount="):
            _mount(around, option[8:])
        elif option == "--mount":
            _mount(around, following)
    lost = [name for name in exported if name not in around.environment]
    if lost:
        around.notes.append(f"the container gets its variables from -e only, not {', '.join(lost)}")


def _pass_on(around: Surroundings, text: str, outside: Mapping[str, str]) -> None:
    name, equals, value = text.partition("=")
    if equals:
        around.environment[name] = value
    elif name in outside:
        around.environment[name] = outside[name]
    elif name:
        around.notes.append(f"-e {name} passes on a variable that is not set here")


def _devices(text: str) -> tuple[str, ...]:
    """The GPUs of --gpus: `device=4,5`, of which the quotes are the option's own, or how many."""
    if text.isascii() and text.isdigit() and len(text) < 4:
        return tuple(str(number) for number in range(int(text)))
    _, named, names = text.strip("\"'").partition("device=")
    names = re.split(r"[\"']|,\w+=", names)[0]
    return tuple(name.strip() for name in names.split(",") if name.strip()) if named else ()


def _volume(around: Surroundings, text: str) -> None:
    outside, separator, rest = text.partition(":")
    if separator and outside.startswith("/"):
        around.volumes.append((rest.split(":")[0], outside))


def _mount(around: Surroundings, text: str) -> None:
    keys = dict(part.partition("=")[::2] for part in text.split(","))
    outside = keys.get("source", keys.get("src"))
    inside = keys.get("target", keys.get("destination", keys.get("dst")))
    if outside and inside and outside.startswith("/"):
        around.volumes.append((inside, outside))


def _numactl(options: Sequence[str]) -> tuple[int, ...]:
    """The nodes that its options name."""
    found: set[int] = set()
    for index, option in enumerate(options):
        name, equals, value = option.partition("=")
        if name not in _NODE_OPTIONS:
            continue
        text = value if equals else "".join(options[index + 1 : index + 2])
        for first, last in re.findall(r"(\d{1,4})(?:-(\d{1,4}))?", text):
            found.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(found))


def _cluster(around: Surroundings, options: Sequence[str]) -> None:
    """`srun --export=ALL,A=B` and `mpirun -x A=B` set variables."""
    for index, option in enumerate(options):
        if option.startswith("--export="):
            pieces = option[9:].split(",")
        elif index and options[index - 1] in ("-x", "--export"):
            pieces = option.split(",")
        else:
            continue
        for piece in pieces:
            match = _ASSIGNMENT.fullmatch(piece)
            if match:
                around.environment[match[1]] = match[2]
