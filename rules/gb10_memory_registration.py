"""GB10: a kernel whose contiguous memory area is miscounted, on which RDMA registration fails.

/proc/meminfo then says CmaFree above CmaTotal, and `ibv_reg_mr_iova2` fails with "Cannot allocate
memory" when NCCL registers its buffers between two machines.
"""

from __future__ import annotations

from collections.abc import Iterator

from dsv4doctor.models import Facts, Finding, HostFacts, Remedy, Severity
from dsv4doctor.rules.rule import Example, NotChecked, Rule
from dsv4doctor.rules.samples import gpus, scene


def check(facts: Facts) -> Iterator[Finding]:
    host = facts.snapshot.host
    assert host is not None
    if facts.arch.name != "sm_121":
        return
    total, free = host.cma_total_bytes, host.cma_free_bytes
    if total is None or free is None:
        raise NotChecked("/proc/meminfo has no CmaTotal and CmaFree")
    if free <= total:
        return
    yield Finding(
        rule=RULE.id,
        severity=Severity.ERROR,
        subject="kernel",
        message=(
            f"Kernel {host.kernel or 'unknown'} counts more free contiguous memory "
            f"({free >> 20:,} MiB) than there is ({total >> 20:,} MiB)."
        ),
        consequence=(
            "NCCL over RoCE fails between machines: Call to ibv_reg_mr_iova2 failed with error "
            "Cannot allocate memory."
        ),
        evidence=(
            f"/proc/meminfo: CmaFree {free >> 10} kB > CmaTotal {total >> 10} kB",
            "MiaAI-Lab/DeepSeek-v4-Flash-DSpark-2x-DGX-Spark issue 259; "
            "eugr/spark-vllm-docker issue 389",
        ),
        remedy=Remedy("Boot the 6.17 kernel, or this one with kho=off."),
    )


RULE = Rule(
    id="DSV503",
    title="GB10 kernel on which memory registration fails",
    severity=Severity.ERROR,
    reads=("host",),
    check=check,
    about_machine=True,
)


def _cma(total: int, free: int, arch: str = "sm_121") -> Facts:
    host = HostFacts("7.0.0-1019-nvidia", cma_total_bytes=total << 20, cma_free_bytes=free << 20)
    return scene(arch, host=host, gpus=gpus(1, arch))


EXAMPLES = (
    Example("more free than there is", _cma(128, 4096), expect=("kernel",)),
    Example("counted right", _cma(128, 96)),
    Example("another GPU", _cma(128, 4096, "sm_120")),
)
