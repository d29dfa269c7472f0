"""What the rules read and say, what it is held against, and the report."""

from __future__ import annotations

from dataclasses import dataclass, field

from dsv4doctor.models.facts import RouterLaunch, Snapshot
from dsv4doctor.models.trace import Layer, Trace
from dsv4doctor.models.vocabulary import Arch, Location, Outcome, Severity


@dataclass(frozen=True)
class Remedy:
    text: str
    commands: tuple[str, ...] = ()
    fix: str | None = None
    """The id of the fix that does it."""


@dataclass(frozen=True)
class Finding:
    rule: str
    severity: Severity
    subject: str
    """The layer or argument it is about."""
    message: str
    """What is wrong, in one sentence."""
    consequence: str
    """What it means for the server, in one sentence a serving engineer understands."""
    evidence: tuple[str, ...]
    locations: tuple[Location, ...] = ()
    remedy: Remedy | None = None


@dataclass(frozen=True)
class RuleResult:
    rule: str
    title: str
    outcome: Outcome
    findings: tuple[Finding, ...] = ()
    reason: str | None = None
    """Why it was skipped, or how it crashed."""
    required: bool = True
    """False: it asks about the machine, and --strict does not insist on it."""


@dataclass(frozen=True)
class Alternative:
    """Another way to launch the same model, traced like the launch itself."""

    change: str
    """What is different, e.g. "--moe-runner-backend marlin, without speculative decoding"."""
    flags: tuple[str, ...]
    """All of SGLang's flags for it."""
    problem: str | None
    """Why it does not help; None: every routed-expert layer (or hot path, where one failed)
    runs, and as the model needs it."""
    layers: tuple[Layer, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    """Variables to export with it."""


@dataclass(frozen=True)
class TreeFeatures:
    """What an SGLang tree's sources have and lack; a file that is not there has nothing."""

    environment_defaults: dict[str, str] = field(default_factory=dict)
    """SGLang's variable -> its default as written, e.g. "True" or "flashinfer"."""
    sparse_mla_file: str | None = None
    """The file with the sparse MLA path of sm_12x; None: there is none."""
    decode_shape_guard: bool = False
    """It asks whether FlashInfer's decode has the shape before it calls."""
    prefill_shape_guard: bool = False
    """Likewise for prefill."""
    split_scratch: Location | None = None
    """Where the page split of touched pages only takes uninitialised memory."""
    torch_indexer: Location | None = None
    """The indexer in plain torch operations for sm_12x."""
    indexer_replaced: bool = False
    """FIX104 is in: the indexer is ours once it is verified on the serving machine."""
    torch_indexer_bytes: int | None = None
    """Bytes of one of its intermediate values: 4 for float32, 2 for bfloat16."""
    torch_indexer_rows: int | None = None
    """The query rows that it computes at once; None: all that it is given."""
    plain_activation: Location | None = None
    """Where NVFP4 experts between two grouped products are activated without a clamp."""
    marlin_one_scale: Location | None = None
    """Where Marlin gets one scale, the gate's, for both halves of NVFP4 experts."""
    probes_experts: Location | None = None
    """Where the experts' stored format is probed from a local snapshot."""
    mooncake_sends_state: bool | None = None
    """None: there is no mooncake transfer."""
    mxfp8_dense: Location | None = None
    """Where dense FP8 weights with 32-blocks are given an MXFP8 backend."""
    dense_fp8_sm12x: str | None = None
    """What `--fp8-gemm-backend auto` becomes on sm_12x."""
    dense_fp8_sm12x_at: Location | None = None
    """The line that says so."""
    tuned_dense_fp8: tuple[str, ...] = ()
    """The GPUs, as SGLang writes their names, with tuned tables for dense block FP8 on Triton."""
    state_by_token: bool = False
    """The KV pool pays the compressor's state of ratio 128 by the token, not by the request."""
    speculative_algorithms: tuple[str, ...] = ()
    """SGLang's own, as --speculative-algorithm takes them; empty: not known."""
    engram_over_ranks: bool = False
    """Engram tables are sharded over the ranks."""


@dataclass(frozen=True)
class Said:
    """What the user said that the facts do not show, to be said again."""

    model: str | None = None
    """MODEL on the command line."""
    python: str | None = None
    snapshot: str | None = None
    """The file that the facts were read from."""
    saved_flags: tuple[str, ...] | None = None
    """The launch's flags, where the launch is the snapshot's own."""


@dataclass(frozen=True)
class Facts:
    """What the rules read: the snapshot, the launch's resolution, and the GPU asked about."""

    snapshot: Snapshot
    arch: Arch
    arch_source: str
    """"--arch", "NVML" or "default"."""
    trace: Trace | None
    trace_failure: str | None = None
    """Why there is no trace."""
    call_texts: dict[str, str] = field(default_factory=dict)
    """"file:line" of a kernel's call site -> the source of that call."""
    alternatives: tuple[Alternative, ...] = ()
    """Tried when the routed experts do not run; empty otherwise."""
    path_alternatives: tuple[Alternative, ...] = ()
    """Tried when another hot path does not run; empty otherwise."""
    notes: tuple[str, ...] = ()
    """What was decided for the user, and what of the launch could not be followed."""
    features: TreeFeatures | None = None
    """What the SGLang tree's sources have and lack."""
    peer: Facts | None = None
    """The other side of a prefill/decode pair."""
    router: RouterLaunch | None = None
    """The router in front of the pair."""
    said: Said = Said()


@dataclass(frozen=True)
class Accepted:
    """A finding that does not count: suppressed, or known from a baseline."""

    finding: Finding
    by: str
    """"suppression" or "baseline"."""
    reason: str
    expires: str | None = None
    """ISO date up to which a suppression holds."""


@dataclass(frozen=True)
class Gate:
    """What the findings were held against, and how the target came out."""

    target: str | None = None
    """Its name in the configuration; None: the only one."""
    fail_on: Severity | None = Severity.ERROR
    """None: no finding fails."""
    accepted: tuple[Accepted, ...] = ()
    notes: tuple[str, ...] = ()
    """Findings that are gone, suppressions that are out of date or met nothing."""
    undetermined: str | None = None
    """Why the answer is not complete."""
    exit_code: int = 0


@dataclass(frozen=True)
class Report:
    """What every output format renders."""

    tool_version: str
    facts: Facts
    results: tuple[RuleResult, ...]
    """Their findings are those that count: accepted ones are in `gate`."""
    timings: dict[str, float] = field(default_factory=dict)
    gate: Gate = Gate()

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(finding for result in self.results for finding in result.findings)


@dataclass(frozen=True)
class Failure:
    """A target that gave no report: its launch could not be read or not be traced."""

    target: str
    message: str
    hint: str | None
    exit_code: int


@dataclass(frozen=True)
class Run:
    """All targets of one run, in their order."""

    outcomes: tuple[Report | Failure, ...]

    @property
    def reports(self) -> tuple[Report, ...]:
        return tuple(outcome for outcome in self.outcomes if isinstance(outcome, Report))

    @property
    def failures(self) -> tuple[Failure, ...]:
        return tuple(outcome for outcome in self.outcomes if isinstance(outcome, Failure))
