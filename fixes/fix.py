"""What a fix is: a pure function from an SGLang tree's sources to changed sources.

A fix never reads the disk or the GPU.  It gets the sources of the files that it names, finds its
place by structure, and answers with one of four outcomes.  Several fixes may change one file: they
are planned one after the other, each on what the one before it left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from dsv4doctor.models import Facts, HotPath, Layer, Location, Role, Trace

Sources = Mapping[str, str]
"""File, relative to the tree's root ("sglang/srt/...py") -> its text; absent files are left out."""


@dataclass(frozen=True)
class Choice:
    """What the user asked for."""

    kernel: str = "auto"
    """"auto", "triton", "cutlass" or "marlin": what a routed-expert layer is sent to."""


@dataclass(frozen=True)
class Aim:
    """What a launch's layers come out with once a fix is in."""

    role: Role
    """Of this model's layers."""
    target: str
    """As in `Change.target`."""
    method: str
    """The class of the quant method."""
    runner: str | None = None
    """The runner backend; None: the method has none, or whichever."""
    operation: str | None = None
    """Our kernel: the server stops while it builds the model until this one is verified."""


@dataclass(frozen=True)
class Asks:
    """One of our kernels that a fix sends to, to be verified on the serving machine."""

    operation: str
    """Its name in `kernels verify`."""
    stops: bool
    """Whether the server stops until then; else SGLang's own path stays in use."""


@dataclass(frozen=True)
class Change:
    """The tree needs the fix, and this is it."""

    sources: Sources
    """The whole new text of each changed file."""
    at: tuple[Location, ...]
    """The lines of the old text that decide and are changed."""
    summary: str
    """What changes, in one sentence."""
    target: str | None = None
    """What the layers get, e.g. "triton"; None: the fix is not about a layer's method.

    Where the launch's flags choose among several, the one that they get without a flag.
    """
    asks: Asks | None = None
    """What it takes on the serving machine."""
    auto: str | None = None
    """What `--moe-runner-backend auto` becomes with it; None: it has no say in that."""
    aim: Callable[[Trace, str | None], Aim | None] = field(
        default=lambda trace, auto: None, compare=False
    )
    """(the trace before, what "auto" becomes once the whole plan is in) -> what the layers get:
    the choice that the inserted code will make.  None: that cannot be said."""


@dataclass(frozen=True)
class Present:
    """The tree does not need it: SGLang has it, or we put it there."""

    at: Location
    how: str
    """E.g. "fixed upstream" or "applied by dsv4doctor"."""


@dataclass(frozen=True)
class Absent:
    """The tree has no such path, so there is nothing to fix."""

    reason: str


@dataclass(frozen=True)
class Refused:
    """The path is there, in a shape that the fix does not know: it is left alone."""

    file: str
    expected: str
    """Source text as the fix knows it."""
    found: str
    """Source text as it is."""
    reason: str


Outcome = Change | Present | Absent | Refused


@dataclass(frozen=True)
class Example:
    """Input and output of `Fix.plan`; each is a test."""

    title: str
    before: Sources
    after: Sources | None
    """The changed files; None: the outcome is not a Change."""
    outcome: type = Change
    choice: Choice = Choice()


@dataclass(frozen=True)
class Fix:
    id: str
    """"FIX101"; every changed place carries it in a comment, which is how `plan` knows its own."""
    title: str
    rules: tuple[str, ...]
    """The rules whose findings it answers."""
    files: tuple[str, ...]
    """The files that `plan` reads, the ones it changes among them."""
    plan: Callable[[Sources, Choice], Outcome]
    needed: Callable[[Facts], str | None]
    """Why this launch needs it; None when it does not."""
    changes: Callable[[Layer], bool]
    """Whether a layer, as traced before, is one that the fix means to change."""
    verify: Callable[[Facts, Facts], tuple[str, ...]]
    """(facts before, facts after, with a trace) -> what did not come out as planned."""
    verified_by: str
    """How it is verified, in one line."""
    examples: tuple[Example, ...] = ()
    changes_path: Callable[[HotPath], bool] = lambda path: False
    """Likewise for a hot path beside the routed experts."""
    leaves: Callable[[Facts, Outcome], str | None] = lambda facts, outcome: None
    """What of its rules this launch is left with, in a place that it does not change."""
