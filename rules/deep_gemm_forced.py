"""Paths through DeepGEMM on sm_12x, for which only some builds of it have kernels.

SGLang keeps the indexer, the output projection and the hyper-connections away from DeepGEMM on
sm_12x unless a variable says otherwise; a build without kernels for the GPU stops with
`Unsupported architecture` when the model first runs.
"""

from __future__ import annotations

from collections.abc import Iterator

from dsv4doctor.models import Facts, Finding, Remedy, Severity
from dsv4doctor.rules.common import in_effect, is_true, set_by_user
from dsv4doctor.rules.rule import Example, Rule
from dsv4doctor.rules.samples import scene

_TORCH = "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH"
_TILELANG = "SGLANG_OPT_USE_TILELANG_INDEXER"
_USES = {
    "SGLANG_OPT_FP8_WO_A_GEMM": "fp8_einsum for the output projection wo_a",
    "SGLANG_OPT_DEEPGEMM_HC_PRENORM": "the hyper-connection kernels (hyperconnection.hpp)",
}


def check(facts: Facts) -> Iterator[Finding]:
    assert facts.features is not None
    if not facts.arch.is_sm12x:
        return
    known = facts.features.environment_defaults
    for name, what in _USES.items():
        if name in known and is_true(in_effect(facts, name)):
            yield _finding(facts, name, what)
    off = [name for name in (_TORCH, _TILELANG) if not is_true(in_effect(facts, name))]
    if _TORCH in known and _TORCH in off and (_TILELANG not in known or _TILELANG in off):
        yield _finding(facts, _TORCH, "fp8_paged_mqa_logits for the indexer (attention.hpp)")


def _finding(facts: Facts, name: str, what: str) -> Finding:
    value, wanted = in_effect(facts, name), set_by_user(facts, name)
    by = "set in the launch or on the machine" if wanted is not None else "SGLang's own value"
    return Finding(
        rule=RULE.id,
        severity=Severity.WARNING,
        subject=name,
        message=f"{name}={value} uses DeepGEMM on {facts.arch.name}: {what}.",
        consequence=(
            "A DeepGEMM build without sm_12x kernels stops the server with an assertion, "
            "Unsupported architecture."
        ),
        evidence=(
            f"{name}: {by}",
            "sgl-project/sglang issue 25877; deepseek-ai/DeepGEMM issue 317",
        ),
        remedy=Remedy(f"{_instead(name, wanted)}, unless {_BUILT}."),
    )


_BUILT = "the DeepGEMM that is installed was built with kernels for sm_12x"


def _instead(name: str, wanted: str | None) -> str:
    """What keeps DeepGEMM out: the user's own value goes, SGLang's own is overruled."""
    if wanted is not None:
        return f"Leave {name} unset on sm_12x"
    return f"Export {name}={1 if name == _TORCH else 0}"


RULE = Rule(
    id="DSV404",
    title="DeepGEMM paths on sm_12x",
    severity=Severity.WARNING,
    reads=("trace", "features"),
    check=check,
)

_PRENORM = "SGLANG_OPT_DEEPGEMM_HC_PRENORM"

EXAMPLES = (
    Example(
        "asked for by the user",
        scene(
            environment={_PRENORM: "1"},
            overwritten={
                "SGLANG_OPT_FP8_WO_A_GEMM": (None, "False"),
                _TORCH: (None, "True"),
            },
        ),
        expect=(_PRENORM,),
    ),
    Example(
        "the DeepGEMM indexer",
        scene(
            environment={_TORCH: "0", _TILELANG: "0"},
            overwritten={
                "SGLANG_OPT_FP8_WO_A_GEMM": (None, "False"),
                _PRENORM: (None, "False"),
            },
        ),
        expect=(_TORCH,),
    ),
    Example(
        "SGLang's own default",
        scene(overwritten={_TORCH: (None, "True"), _PRENORM: (None, "False")}),
        expect=("SGLANG_OPT_FP8_WO_A_GEMM",),
    ),
    Example("what SGLang sets on sm_120", scene()),
    Example("sm_100", scene("sm_100", overwritten={})),
)
