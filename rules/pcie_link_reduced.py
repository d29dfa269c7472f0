"""A GPU of the launch whose PCIe link is narrower or slower than the GPU could have.

Lanes are lost to a riser, a badly seated card or a slot that shares them; the generation to an
older board.  Without NVLink, everything that the ranks tell each other goes over these links.
"""

from __future__ import annotations

from collections.abc import Iterator

from dsv4doctor.models import Facts, Finding, Link, Remedy, Severity
from dsv4doctor.rules.rule import Example, NotChecked, Rule
from dsv4doctor.rules.topology import machine, number, topology, used_gpus


def check(facts: Facts) -> Iterator[Finding]:
    mine = {gpu.pci_bus_id for gpu in used_gpus(facts)}
    links = [link for link in topology(facts).links if link.address in mine]
    if not links:
        raise NotChecked("the driver does not say how the GPUs are connected")
    for link in links:
        said = _lacking(link)
        if said is None:
            continue
        lanes = link.width is not None and link.gpu_width is not None
        is_narrow = lanes and (link.width or 0) < (link.gpu_width or 0)
        yield Finding(
            rule=RULE.id,
            severity=Severity.WARNING if is_narrow else Severity.INFO,
            subject=f"PCIe link of {number(facts, link.address)}",
            message=f"{number(facts, link.address)} {said}.",
            consequence="Copies to and from this GPU, and all-reduces over PCIe with all others, "
            "are as slow as its link.",
            evidence=(
                f"{link.address}: generation {link.generation} of {link.gpu_generation}, "
                f"{link.width} of {link.gpu_width} lanes (NVML)",
            ),
            remedy=Remedy(
                "Look at the card's seat, riser and the slot's setting in the BIOS "
                "(nvidia-smi -q -d PCIE while the GPU works); or leave this GPU out."
                if is_narrow
                else "Nothing to set: the slot is of an older generation than the GPU."
            ),
        )


def _lacking(link: Link) -> str | None:
    if link.width is not None and link.gpu_width is not None and link.width < link.gpu_width:
        return f"runs on {link.width} of its {link.gpu_width} PCIe lanes"
    if link.generation is None or link.gpu_generation is None:
        return None
    if link.generation < link.gpu_generation:
        return (
            f"sits in a slot of PCIe generation {link.generation} and could do "
            f"{link.gpu_generation}"
        )
    return None


RULE = Rule(
    id="DSV603",
    title="PCIe link below what the GPU can do",
    severity=Severity.WARNING,
    reads=("trace", "host"),
    check=check,
    about_machine=True,
)

EXAMPLES = (
    Example("half the lanes", machine(links=({}, {"width": 8})), expect=("PCIe link of GPU 1",)),
    Example(
        "an older board",
        machine(links=({"generation": 4}, {"generation": 4})),
        expect=("PCIe link of GPU 0", "PCIe link of GPU 1"),
    ),
    Example("all that there is", machine()),
    Example(
        "a GPU that the launch does not take",
        machine(links=({}, {"width": 4}), resolved={"tp_size": 1}),
    ),
    Example("not readable", machine(links=({"width": None, "gpu_generation": None},) * 2)),
)
