"""Variables with which the user forces torch paths of higher precision and little speed.

They are handed around as ways past a fault of one release and stay in launch scripts for good.  In
a release without the fault they only cost time.
"""

from __future__ import annotations

from collections.abc import Iterator

from dsv4doctor.models import Facts, Finding, Remedy, Severity
from dsv4doctor.rules.common import in_effect, is_true, set_by_user
from dsv4doctor.rules.rule import Example, Rule
from dsv4doctor.rules.samples import scene

_FORCES = {
    "SGLANG_SM120_FLASHMLA_BACKEND": ("torch", "sparse MLA attention in torch operations"),
    "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH": ("on", "the indexer in torch operations"),
    "SGLANG_OPT_USE_TILELANG_MHC_PRE": ("off", "hyper-connections in FP32 torch operations"),
    "SGLANG_OPT_FP8_WO_A_GEMM": ("off", "the output projection wo_a dequantised to BF16"),
}
"""Variable -> the value that forces it, and what it forces."""
_INDEXER = "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH"


def check(facts: Facts) -> Iterator[Finding]:
    assert facts.features is not None
    for name, (forcing, what) in _FORCES.items():
        value = set_by_user(facts, name)
        default = facts.features.environment_defaults.get(name)
        if value is None or default is None or not _is(value, forcing) or _is(default, forcing):
            continue
        if in_effect(facts, name) != value or _sglang_would(facts, name):
            continue
        yield Finding(
            rule=RULE.id,
            severity=Severity.WARNING,
            subject=name,
            message=f"{name}={value} forces {what}.",
            consequence="The server runs, slower than this SGLang does by itself.",
            evidence=(f"{name}: {value} in the launch, {default} by default",),
            remedy=Remedy(f"Leave {name} unset, unless it is there to avoid a fault."),
        )


def _is(value: str, forcing: str) -> bool:
    if forcing in ("on", "off"):
        return is_true(value) is (forcing == "on")
    return value.strip().lower() == forcing


def _sglang_would(facts: Facts, name: str) -> bool:
    """True where the variable changes nothing: SGLang turns these three the same way on sm_12x,
    and its TileLang indexer goes before the torch one."""
    if name == _INDEXER and is_true(in_effect(facts, "SGLANG_OPT_USE_TILELANG_INDEXER")):
        return True
    return facts.arch.is_sm12x and name not in (_INDEXER, "SGLANG_SM120_FLASHMLA_BACKEND")


RULE = Rule(
    id="DSV205",
    title="Slow torch paths forced by the environment",
    severity=Severity.WARNING,
    reads=("trace", "launch", "features"),
    check=check,
)

_ATTENTION = "SGLANG_SM120_FLASHMLA_BACKEND"

EXAMPLES = (
    Example("torch attention", scene(environment={_ATTENTION: "torch"}), expect=(_ATTENTION,)),
    Example(
        "wo_a in BF16 on sm_100",
        scene("sm_100", overwritten={}, environment={"SGLANG_OPT_FP8_WO_A_GEMM": "0"}),
        expect=("SGLANG_OPT_FP8_WO_A_GEMM",),
    ),
    Example("what sm_120 does anyway", scene(environment={"SGLANG_OPT_FP8_WO_A_GEMM": "0"})),
    Example("Triton attention", scene(environment={_ATTENTION: "triton"})),
    Example("nothing set", scene()),
)
