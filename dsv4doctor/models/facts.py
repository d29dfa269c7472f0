"""What is there: GPUs, host, packages, checkpoint, launch; together a snapshot."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dsv4doctor.models.vocabulary import Arch, Location, Role, StoredFormat


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


CONTAINERS = frozenset(("docker", "podman", "nerdctl", "kubectl"))
"""What starts a server in a container."""


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
    configured: tuple[str, ...] = ()
    """The keys of the file that --config names, as flags."""
    devices: tuple[str, ...] = ()
    """The GPUs that a container in front is given by name; empty: all, or nothing says."""

    @property
    def in_container(self) -> bool:
        """It sees no variables but its own."""
        return not CONTAINERS.isdisjoint(self.wrappers)

    @property
    def all_flags(self) -> tuple[str, ...]:
        """`configured` and `flags`, of which the last counts."""
        return (*self.configured, *self.flags)


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
