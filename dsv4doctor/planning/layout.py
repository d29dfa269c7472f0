"""What a plan is made of."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from dsv4doctor.models import Arch, Gpu


class Part(str, Enum):
    """What a server is for."""

    PREFILL = "prefill"
    DECODE = "decode"
    SINGLE = "server"
    """Both in one process."""


@dataclass(frozen=True)
class Setting:
    """A flag or an environment variable, its values, and why it has them."""

    name: str
    """ "--tp-size" or "NCCL_DEBUG"."""
    values: tuple[str, ...]
    """Of a flag any number, none for a switch; of a variable one."""
    why: str

    @property
    def words(self) -> tuple[str, ...]:
        """As on a command line."""
        return (self.name, *self.values)

    @property
    def shown(self) -> str:
        """`--flag value`, or `NAME=value`."""
        if self.name.startswith("-"):
            return " ".join(self.words)
        return f"{self.name}={self.values[0]}"


@dataclass(frozen=True)
class Ports:
    """One server's."""

    service: int
    dist_init: int
    bootstrap: int | None = None
    """The prefill side's, and known to the decode side."""


@dataclass(frozen=True)
class Server:
    """One SGLang process group."""

    part: Part
    gpus: tuple[Gpu, ...]
    nodes: tuple[int, ...]
    """The NUMA nodes of its GPUs; empty: not known."""
    bind: bool
    """Bind its CPUs and memory to `nodes`."""
    ports: Ports
    flags: tuple[Setting, ...]
    """SGLang's, without the model."""
    environment: tuple[Setting, ...] = ()
    """Its own variables, besides the shared ones."""

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(word for flag in self.flags for word in flag.words)


@dataclass(frozen=True)
class Router:
    """In front of a prefill and a decode server."""

    flags: tuple[Setting, ...]
    port: int
    metrics_port: int


@dataclass(frozen=True)
class Plan:
    """Everything that is written."""

    model: str
    model_name: str
    interpreter: str
    release: str
    """SGLang's version."""
    arch: Arch
    host: str
    """The address that the outside reaches."""
    shared: tuple[Setting, ...]
    """Environment variables of every server."""
    servers: tuple[Server, ...]
    router: Router | None
    patches: tuple[str, ...] = ()
    """Changes to the SGLang tree that the trace says would help, each with its reason."""
    notes: tuple[str, ...] = ()
    """What was decided for the user and is worth a line."""
    problems: tuple[str, ...] = ()
    """Why the plan is not sound; empty: nothing known stands against it."""

    @property
    def is_pair(self) -> bool:
        return self.router is not None


INSIDE = "127.0.0.1"
"""Where servers listen that only the router talks to."""
NUMACTL = "numactl has to be installed where the servers start"
"""The note of a plan that binds its servers."""


def without_numactl(plan: Plan) -> Plan:
    """`plan` for files that bind by other means."""
    return replace(plan, notes=tuple(note for note in plan.notes if note != NUMACTL))
