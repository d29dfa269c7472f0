"""SGLang's communication options that are built on NVLink's multicast or peer memory, asked for
on GPUs without NVLink: FlashInfer's all-reduce fusion, NVLS, symmetric memory, MSCCL++.
"""

from __future__ import annotations

from collections.abc import Iterator

from dsv4doctor.models import Facts, Finding, Remedy, Severity
from dsv4doctor.rules.rule import Example, Rule
from dsv4doctor.rules.topology import has_nvlink, machine, ranks

_OPTIONS = {
    "flashinfer_allreduce_fusion_backend": "FlashInfer's all-reduce fusion",
    "enable_flashinfer_allreduce_fusion": "FlashInfer's all-reduce fusion",
    "enable_nccl_nvls": "NCCL's NVLS",
    "enable_symm_mem": "NCCL's symmetric memory",
    "enable_torch_symm_mem": "torch's symmetric memory",
    "enable_mscclpp": "MSCCL++",
}

_FUSIONS = ("flashinfer_allreduce_fusion_backend", "enable_flashinfer_allreduce_fusion")
"""What SGLang switches on by itself on sm_90 and sm_100."""
_SWITCH_OFF = "Add --enforce-disable-flashinfer-allreduce-fusion"


def check(facts: Facts) -> Iterator[Finding]:
    trace = facts.trace
    assert trace is not None
    asked = {name: value for name in _OPTIONS if (value := trace.resolved_args.get(name))}
    if ranks(facts) < 2 or not asked or has_nvlink(facts):
        return
    for name, value in asked.items():
        flag = f"--{name.replace('_', '-')}"
        said = flag if value is True else f"{flag} {value}"
        own = not _is_written(facts, flag)
        remedy = _SWITCH_OFF if own and name in _FUSIONS else f"Leave {flag} out"
        yield Finding(
            rule=RULE.id,
            severity=Severity.INFO if own else Severity.WARNING,
            subject=flag,
            message=f"{said}{' (by SGLang itself)' if own else ''}: {_OPTIONS[name]} needs NVLink, "
            "and these GPUs have none.",
            consequence="SGLang falls back with a warning, or stops while it sets the "
            "communication up.",
            evidence=(f"{name} = {value!r} after SGLang resolved its arguments", "no NVLink is up"),
            remedy=Remedy(f"{remedy}: over PCIe NCCL does the all-reduce."),
        )


def _is_written(facts: Facts, flag: str) -> bool:
    launch = facts.snapshot.launch
    return launch is not None and any(word.partition("=")[0] == flag for word in launch.all_flags)


RULE = Rule(
    id="DSV605",
    title="Communication that needs NVLink",
    severity=Severity.WARNING,
    reads=("trace", "host"),
    check=check,
    about_machine=True,
)

_FUSION = {"flashinfer_allreduce_fusion_backend": "auto"}
_ASKED = ("--flashinfer-allreduce-fusion-backend", "auto")
_NVLINK = {"nvlinks": 18}

EXAMPLES = (
    Example(
        "all-reduce fusion on PCIe",
        machine(resolved=_FUSION, flags=_ASKED),
        expect=("--flashinfer-allreduce-fusion-backend",),
    ),
    Example(
        "SGLang's own fusion on PCIe H100s",
        machine(2, "sm_90", links=({"nvlinks": 0},) * 2, resolved=_FUSION),
        expect=("--flashinfer-allreduce-fusion-backend",),
    ),
    Example(
        "NVLS and symmetric memory on PCIe",
        machine(resolved={"enable_nccl_nvls": True, "enable_symm_mem": True}),
        expect=("--enable-nccl-nvls", "--enable-symm-mem"),
    ),
    Example("fusion over NVLink", machine(2, "sm_100", links=(_NVLINK, _NVLINK), resolved=_FUSION)),
    Example("not asked for", machine(resolved={"enable_nccl_nvls": False})),
    Example("one rank", machine(1, resolved=_FUSION)),
)
