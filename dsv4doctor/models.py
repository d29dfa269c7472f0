"""The types that travel from facts to trace to rules to reports.

Every type is a frozen dataclass of plain values and turns into JSON field by field
(`dsv4doctor.jsonio`).  This module imports nothing of ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

# ------------------------------------------------------------------------------ vocabulary


class Severity(str, Enum):
    """How bad a finding is."""

    ERROR = "error"
    """Will crash or give wrong output."""
    WARNING = "warning"
    """Slow or fragile."""
    INFO = "info"


class Verdict(str, Enum):
    """What will become of a layer on the GPU in question."""

    RUNS = "runs"
    FALLBACK = "fallback"
    """Runs, on a path that is far slower than what the GPU can do."""
    FAILS = "fails"
    UNKNOWN = "unknown"
    """Not determined; the reason is beside it.  Never printed as "runs"."""


class Outcome(str, Enum):
    """How a rule ended."""

    PASS = "pass"
    FINDING = "finding"
    SKIP = "skip"
    """A fact it needs is missing; the reason is beside it."""
    CRASH = "crash"


class Role(str, Enum):
    """Which model of a launch a layer belongs to."""

    MAIN = "main"
    DRAFT = "draft"


class StoredFormat(str, Enum):
    """How a layer's weights lie in the checkpoint's files."""

    NVFP4 = "NVFP4"
    """E2M1 pairs (U8) with FP8 E4M3 scales per 16 and a global scale."""
    MXFP4 = "MXFP4"
    """E2M1 pairs (I8 or U8) with UE8M0 scales per 32."""
    FP8_BLOCK = "FP8 block"
    """FP8 E4M3 with a scale per block."""
    BF16 = "BF16"
    INT4 = "INT4"
    """Packed 4-bit integers (I32) with group scales."""
    OTHER = "other"
    """Readable, but none of the above; the dtypes are in the detail."""
    MISSING = "missing"
    """No tensors of that layer are stored."""


@dataclass(frozen=True)
class Arch:
    """A CUDA compute capability, e.g. 12.0 for sm_120."""

    major: int
    minor: int

    @property
    def name(self) -> str:
        return f"sm_{self.major}{self.minor}"

    @property
    def is_sm12x(self) -> bool:
        return self.major == 12


ARCHS = {a.name: a for a in (Arch(9, 0), Arch(10, 0), Arch(10, 3), Arch(12, 0), Arch(12, 1))}
"""The architectures that `--arch` takes."""


@dataclass(frozen=True)
class Location:
    """A line in a file, with its text when it was read."""

    file: str
    """Absolute, or relative to the SGLang tree (`sglang/srt/...`)."""
    line: int
    function: str | None = None
    source: str | None = None


# ------------------------------------------------------------------------------ facts


@dataclass(frozen=True)
class Gpu:
    index: int
    name: str
    arch: Arch
    memory_bytes: int
    pci_bus_id: str | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None
    numa_node: int | None = None


@dataclass(frozen=True)
class GpuFacts:
    gpus: tuple[Gpu, ...]
    driver: str | None = None
    unavailable: str | None = None
    """Why there are no GPUs in the list, e.g. "no NVIDIA driver (NVML not found)"."""


@dataclass(frozen=True)
class Link:
    """How a GPU hangs on the machine.  None: not readable."""

    address: str
    """PCI address as NVML writes it."""
    generation: int | None = None
    """The PCIe generation that GPU and slot can do together."""
    gpu_generation: int | None = None
    """The one that the GPU could do elsewhere."""
    width: int | None = None
    """Lanes in use."""
    gpu_width: int | None = None
    """Lanes that GPU and slot have."""
    nvlinks: int | None = None
    """NVLinks that are up."""


@dataclass(frozen=True)
class Pair:
    """Two GPUs of one machine.  None: not readable."""

    first: str
    second: str
    path: str | None = None
    """What lies between them on PCIe: "board", "switch", "switches", "host bridge", "NUMA node"
    or "system"."""
    peer_to_peer: str | None = None
    """"ok", or why the driver does not offer it."""
    nvlink: bool | None = None


@dataclass(frozen=True)
class Topology:
    links: tuple[Link, ...] = ()
    pairs: tuple[Pair, ...] = ()
    iommu: str | None = None
    """Of the GPUs: "off", "passthrough" or "translating"."""
    acs_redirect: tuple[str, ...] | None = None
    """Bridges above the GPUs that send peer-to-peer traffic up to the root; None: config space is
    readable for root only."""


@dataclass(frozen=True)
class Measurement:
    """One bounded test on the machine's GPUs (`--level full`)."""

    name: str
    """"all-reduce", "all-reduce without P2P", "copy to GPU", "copy from GPU" or "copy between
    GPUs"."""
    outcome: str
    """"ok", "hang" or "failed"."""
    gigabytes_per_second: float | None = None
    detail: str = ""


@dataclass(frozen=True)
class HostFacts:
    """The machine around the GPUs.  None and empty: not readable here."""

    kernel: str | None = None
    """The kernel's release, e.g. "6.17.0-1014-nvidia"."""
    memory_bytes: int | None = None
    cma_total_bytes: int | None = None
    cma_free_bytes: int | None = None
    nvcc: str | None = None
    """The nvcc that a JIT build takes: CUDA_HOME's, else the first on PATH."""
    nvcc_version: str | None = None
    """E.g. "12.9"."""
    cuda_home: str | None = None
    container: str | None = None
    """"docker", "podman", "kubernetes", ... when there are signs of one."""
    may_set_memory_policy: bool | None = None
    """False: a seccomp filter is on and CAP_SYS_NICE is missing, as in a default container."""
    memory_nodes: tuple[int, ...] = ()
    """NUMA nodes this process may take memory from."""
    cpus: int | None = None
    """CPUs this process may run on."""
    numa_nodes: tuple[int, ...] = ()
    pci_roots: dict[str, str] = field(default_factory=dict)
    """A GPU's PCI address -> the host bridge it hangs off, e.g. "pci0000:40"."""
    pci_switches: dict[str, str] = field(default_factory=dict)
    """A GPU's PCI address -> the first bridge below its host bridge."""
    hub_model: str | None = None
    """The Hugging Face id that the launch names, when it names one."""
    hub_model_cached: bool | None = None
    """Whether that model's config.json lies in the local hub cache."""
    topology: Topology | None = None
    """None: not read, as without GPUs."""
    measured: tuple[Measurement, ...] = ()
    """Empty: nothing was measured."""


@dataclass(frozen=True)
class Package:
    """One distribution of the serving stack, against what the SGLang tree asks for."""

    name: str
    version: str | None
    """None: not installed."""
    required: str | None
    """SGLang's own requirement, e.g. "==0.6.12"; None: SGLang does not declare it."""
    satisfied: bool | None
    """None: nothing to compare."""


@dataclass(frozen=True)
class SglangTree:
    """An SGLang source tree, as it will be imported."""

    root: str
    """The folder that holds `sglang/`, to be put on sys.path."""
    version: str
    origin: str
    """"installed" (in the target interpreter), "folder" or "wheel" (fetched)."""

    @property
    def borrowed(self) -> bool:
        """True when the interpreter around it is not the environment that will serve."""
        return self.origin != "installed"


@dataclass(frozen=True)
class NativeLibrary:
    """The GPU code in one library: "90a" runs on that GPU alone, "120f" on its family."""

    path: str
    """Relative to the package's parent folder, e.g. "sgl_kernel/sm100/common_ops.abi3.so"."""
    cubins: tuple[str, ...] = ()
    ptx: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    """The torch operators whose schemas stand in it."""
    problem: str | None = None
    """Why it could not be read, or not whole."""


@dataclass(frozen=True)
class Declaration:
    """What FlashInfer's own source says of the GPUs that one of its functions is for."""

    symbol: str
    """As it is imported, e.g. "flashinfer.fused_moe.cutlass_fused_moe"."""
    kind: str
    """"decorator" (its compute-capability decorator), "jit" (what it compiles for), "launcher"
    (what its launcher admits), "cubins" (the prebuilt kernels that it picks from), "manifest"
    (those that are installed), or "failure" (of which only the error is known that a kernel ends
    in that does not run)."""
    admits: tuple[str, ...]
    """Compute capabilities, e.g. "12.0", or whole generations, "12.x"."""
    at: Location
    prebuilt: bool = False
    """Of kind "jit": what it compiles only launches prebuilt kernels, so it proves nothing."""
    refusal: str | None = None
    """The error on a GPU that is not admitted; {sm} is that GPU's number."""
    by_backend: bool = False
    """The function has several backends, and which one is called decides: it is a no where none
    of them admits the GPU, and never a yes."""


@dataclass(frozen=True)
class KernelEvidence:
    """Which GPUs the installed kernels are for, by what is installed itself."""

    flashinfer: str | None = None
    """The version that was read; None: there is none."""
    flashinfer_problem: str | None = None
    declarations: tuple[Declaration, ...] = ()
    libraries: tuple[NativeLibrary, ...] = ()


@dataclass(frozen=True)
class Stack:
    interpreter: str
    python_version: str
    packages: tuple[Package, ...]
    evidence: KernelEvidence = KernelEvidence()
    """Empty in a snapshot of an older dsv4doctor."""


@dataclass(frozen=True)
class TensorInfo:
    name: str
    dtype: str
    """The safetensors dtype, e.g. "U8", "F8_E4M3", "F8_E8M0"; empty when the index names the
    tensor and its shard does not hold it."""
    shape: tuple[int, ...]
    shard: str


@dataclass(frozen=True)
class ExpertLayer:
    """The routed experts of one layer as stored."""

    name: str
    """The tensors' own prefix, e.g. "layers.3.ffn.experts" or "mtp.0.ffn.experts"."""
    role: Role
    index: int
    """Layer number for main, stage number for draft."""
    stored_format: StoredFormat
    experts: int
    detail: str
    """The dtypes behind the format, e.g. "U8 + F8_E4M3 weight_scale per 16"."""


@dataclass(frozen=True)
class Checkpoint:
    path: str
    """The folder; for facts from a snapshot, the folder on the machine that wrote it."""
    name: str
    architectures: tuple[str, ...]
    config: dict[str, Any]
    """config.json as read."""
    text_config: dict[str, Any]
    """The language model's part: `config["text_config"]` when nested, else `config`."""
    hf_quant_config: dict[str, Any] | None
    declared_main: StoredFormat | None
    """What the configuration says of the main routed experts; None: it says nothing."""
    declared_draft: StoredFormat | None
    layers: tuple[ExpertLayer, ...]
    draft_stages: int
    """Counted from the tensors (`mtp.N`)."""
    tensors: tuple[TensorInfo, ...]
    """Every tensor but the experts above number 0, in the index's order.  A layer's first
    listed expert stays whatever its number."""
    tensor_count: int
    payload_bytes: int
    shard_count: int
    content_key: str
    """sha256 over config, quant config, index and every shard header."""
    notes: tuple[str, ...] = ()
    """What is odd but readable, e.g. a stale total_size."""
    indexed: bool = True
    """False: there is no model.safetensors.index.json."""

    @property
    def main_layers(self) -> tuple[ExpertLayer, ...]:
        return tuple(layer for layer in self.layers if layer.role is Role.MAIN)

    @property
    def draft_layers(self) -> tuple[ExpertLayer, ...]:
        return tuple(layer for layer in self.layers if layer.role is Role.DRAFT)


@dataclass(frozen=True)
class Launch:
    """A server launch as written: environment, model and SGLang flags."""

    source: str
    """The script's path, or "command line"."""
    line: int | None
    """Line of the SGLang command in the script."""
    environment: dict[str, str]
    """What the script exports or sets in front of the command (and --env)."""
    model: str | None
    """The value of --model-path / --model / the positional of `sglang serve`."""
    flags: tuple[str, ...]
    """SGLang's arguments without the model's."""
    interpreter: str | None = None
    """The Python named in the command, when it names one by path."""
    wrappers: tuple[str, ...] = ()
    """What stood in front, e.g. ("exec", "numactl"), outermost first."""
    notes: tuple[str, ...] = ()
    """What the reader could not follow, e.g. an unset variable."""
    unknown: tuple[str, ...] = ()
    """Arguments whose value only a running shell knows, and why: the launch is not complete."""
    numa_nodes: tuple[int, ...] = ()
    """The NUMA nodes that a numactl in front binds it to."""
    given: tuple[str, ...] = ()
    """The variables of `environment` that --env or the configuration gave."""


@dataclass(frozen=True)
class RouterLaunch:
    """A launch of SGLang's router, as written."""

    source: str
    line: int
    pd: bool
    """It was told to split requests between prefill and decode servers."""
    prefill: tuple[tuple[str, str | None], ...]
    """(URL, bootstrap port or None) each."""
    decode: tuple[str, ...]
    """URLs."""
    workers: tuple[str, ...]
    """URLs of servers that do both."""
    host: str
    port: str
    metrics_port: str | None
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Snapshot:
    """All facts of one machine and one launch."""

    tool_version: str
    created: str
    """ISO 8601, UTC."""
    gpu: GpuFacts
    sglang: SglangTree | None
    stack: Stack | None
    checkpoint: Checkpoint | None
    launch: Launch | None
    environment: dict[str, str]
    """The variables that SGLang, CUDA, NCCL, torch or FlashInfer read; secrets redacted."""
    host: HostFacts | None = None


# ------------------------------------------------------------------------------ trace


@dataclass(frozen=True)
class Branch:
    """One condition met on the way to a decision."""

    location: Location
    condition: str
    values: dict[str, str]
    """Name in the condition -> the value seen, as Python would write it."""
    taken: bool | None = None


@dataclass(frozen=True)
class Step:
    """One dispatch function that ran, with the branches it took."""

    phase: str
    """"arguments", "main" or "draft"."""
    function: str
    file: str
    branches: tuple[Branch, ...]
    returned: str | None
    times: int = 1


@dataclass(frozen=True)
class ArgChange:
    """SGLang changed one of its own arguments while resolving them."""

    name: str
    before: str | None
    after: str | None
    at: Location


@dataclass(frozen=True)
class SglangError:
    """An exception that SGLang itself raised: a result, not a failure of the tool."""

    phase: str
    """"arguments", "main", "draft", "main weights", "main forward", ..."""
    type: str
    message: str
    at: Location | None


@dataclass(frozen=True)
class Kernel:
    """The first kernel entry that a layer's forward reached."""

    symbol: str
    """E.g. "flashinfer.fused_moe.trtllm_fp4_block_scale_routed_moe"."""
    call_site: Location | None


@dataclass(frozen=True)
class Layer:
    """The routed experts of one layer as SGLang built them."""

    name: str
    """SGLang's module name, e.g. "model.layers.3.mlp.experts"."""
    role: Role
    stored_format: StoredFormat | None
    """None: the checkpoint's headers were not read or hold no such layer."""
    quant_method: str | None
    runner_backend: str | None
    """None: the quant method has no runner."""
    decided_at: Location | None
    flags_consulted: tuple[str, ...]
    """The arguments and environment variables that the deciding code read."""
    kernel: Kernel | None
    verdict: Verdict
    reason: str
    """Why the verdict is what it is, in one sentence."""
    error: SglangError | None = None
    """Raised while the layer loaded its weights or ran."""


@dataclass(frozen=True)
class HotPath:
    """What one class of layers does beside its routed experts, and with which kernel."""

    name: str
    """"dense-fp8", "sparse-mla-decode", "sparse-mla-prefill", "indexer-decode", "indexer-prefill",
    "mhc-pre", "mhc-post", "kv-cache" or "all-reduce"."""
    role: Role
    layers: tuple[str, ...]
    """SGLang's module names; empty for what no single layer does."""
    choice: str | None
    """In the words of SGLang's options, e.g. "triton" or "flashinfer"; None: unknown."""
    kernel: Kernel | None
    """The first kernel reached; for plain torch operations, SGLang's function that holds them."""
    decided_at: Location | None
    flags_consulted: tuple[str, ...]
    verdict: Verdict
    reason: str
    detail: str = ""
    """Sizes that matter, e.g. the width of the indexer's logits or bytes per token."""
    error: SglangError | None = None


@dataclass(frozen=True)
class Trace:
    """What one launch resolves to."""

    sglang: SglangTree
    arch: Arch
    resolved_args: dict[str, Any]
    """SGLang's arguments after its own resolution: moe_runner_backend, quantization, ..."""
    arg_changes: tuple[ArgChange, ...]
    environment_overwritten: dict[str, tuple[str | None, str]]
    """Variable -> (value before, value that SGLang set)."""
    layers: tuple[Layer, ...]
    errors: tuple[SglangError, ...]
    steps: tuple[Step, ...]
    """The decision path; empty unless asked for."""
    leniencies: tuple[str, ...]
    """What stood in for something missing, and could have mattered."""
    timings: dict[str, float]
    """Seconds by phase."""
    cached: bool = False
    unresolved: tuple[str, ...] = ()
    """What stopped the trace and was not raised by SGLang itself: the answer is unknown."""
    paths: tuple[HotPath, ...] = ()
    """Empty unless asked for."""

    def of(self, role: Role) -> tuple[Layer, ...]:
        return tuple(layer for layer in self.layers if layer.role is role)


# ------------------------------------------------------------------------------ findings


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
    """Why it does not help; None: every routed-expert layer runs, and as the model needs it."""
    layers: tuple[Layer, ...] = ()


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
    torch_indexer_bytes: int | None = None
    """Bytes of one of its intermediate values: 4 for float32, 2 for bfloat16."""
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
    engram_over_ranks: bool = False
    """Engram tables are sharded over the ranks."""


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
    """Tried when the launch does not run; empty otherwise."""
    notes: tuple[str, ...] = ()
    """What was decided for the user, and what of the launch could not be followed."""
    features: TreeFeatures | None = None
    """What the SGLang tree's sources have and lack."""
    peer: Facts | None = None
    """The other side of a prefill/decode pair."""
    router: RouterLaunch | None = None
    """The router in front of the pair."""


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
