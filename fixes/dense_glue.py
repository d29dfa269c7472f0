"""FIX106: small float32 products on bf16 tensor cores.

Looks for: the linear part of mHC's pre mixing in plain torch (`hc_pre`), and the batched product
of the torch indexer where that is in float32 (0.5.14 and 0.5.15; later releases have it in bf16).
Writes: our kernels, which split a float32 operand into bf16 terms; without a stamp SGLang's own
lines stay.
"""

from __future__ import annotations

import libcst as cst
import libcst.matchers as m

from dsv4doctor.fixes import edit
from dsv4doctor.fixes import verified_kernels as shared
from dsv4doctor.fixes.fix import Absent, Choice, Example, Fix, Outcome, Present, Refused, Sources
from dsv4doctor.models import Facts, Trace
from dsv4doctor.rules.common import in_effect, is_true
from dsv4doctor.rules.rule import NotChecked

ID = "FIX106"
MODEL = "sglang/srt/models/deepseek_v4.py"
INDEXER = "sglang/srt/layers/attention/dsv4/indexer.py"
_TORCH_HC = "hc_pre_torch_impl"
_TORCH_INDEXER = "fp8_paged_mqa_logits_torch_sm120"
_ELSEWHERE = (
    "SGLANG_OPT_USE_TILELANG_MHC_PRE", "SGLANG_OPT_DEEPGEMM_HC_PRENORM",
    "SGLANG_OPT_USE_FLASHINFER_MHC",
)  # fmt: skip
"""Each sends mHC's pre mixing to another kernel."""


def _hc_code(piece: edit.Piece, node: cst.CSTNode) -> str:
    return (
        f"# dsv4doctor {ID}: on tensor cores, float32 as two terms of bf16.\n"
        + shared.ours(ID, "hc_mix", "dense_glue", "hc_pre_torch_impl")
        + "if hc_mix is not None:\n"
        "    x_flat, mixes = hc_mix(x, hc_fn, self.rms_norm_eps)\n"
        f"else:\n    {piece.source(node)}\n"
    )


def _bmm_code(piece: edit.Piece, node: cst.CSTNode) -> str:
    return (
        f"# dsv4doctor {ID}: values that came from FP8, exact in bf16.\n"
        + shared.ours(ID, "bmm", "dense_glue", "indexer_bmm")
        + "if bmm is not None:\n    score = bmm(kv_value, q)\n"
        f"else:\n    {piece.source(node)}\n"
    )


_HC = shared.Site(
    files=(MODEL,),
    function="*.hc_pre",
    word=_TORCH_HC,
    matcher=m.SimpleStatementLine(
        body=[
            m.Assign(
                targets=[
                    m.AssignTarget(
                        m.Tuple(elements=[m.Element(m.Name("x_flat")), m.Element(m.Name("mixes"))])
                    )
                ],
                value=m.Call(
                    func=m.Name(_TORCH_HC), args=[m.Arg(m.Name("x")), m.Arg(m.Name("hc_fn"))]
                ),
            )
        ]
    ),
    code=_hc_code,
    expected=f"x_flat, mixes = {_TORCH_HC}(x, hc_fn)",
    reason="the torch form of mHC's pre mixing is called another way",
)
_BMM = shared.Site(
    files=(INDEXER,),
    function=_TORCH_INDEXER,
    word="torch.bmm(",
    matcher=m.SimpleStatementLine(
        body=[
            m.Assign(
                targets=[m.AssignTarget(m.Name("score"))],
                value=m.Call(
                    func=m.Attribute(m.Name("torch"), m.Name("bmm")),
                    args=[m.Arg(m.Name("kv_value")), m.Arg(m.Call())],
                ),
            )
        ]
    ),
    code=_bmm_code,
    expected="score = torch.bmm(kv_value, q.transpose(1, 2))",
    reason="the indexer's product is computed another way",
)


def plan(sources: Sources, choice: Choice) -> Outcome:
    sites = (_HC, _BMM) if _float32_indexer(sources) else (_HC,)
    both = "mHC's pre mixing and the torch indexer's product run"
    what = both if _BMM in sites else "mHC's pre mixing runs"
    summary = f"On sm_12x {what} on bf16 tensor cores."
    return shared.plan(sources, choice, ID, sites, summary, "dense_glue")


def _float32_indexer(sources: Sources) -> bool:
    piece = edit.find_piece(sources, INDEXER, _TORCH_INDEXER)
    return piece is not None and "q_fp8[:, 0].to(torch.float32)" in piece.text


def needed(facts: Facts) -> str | None:
    reason = "mHC's pre mixing runs in float32 torch operations"
    if not facts.arch.is_sm12x:
        return None
    if facts.trace is not None and facts.trace.paths:
        return reason if _on_torch(facts.trace) else None
    try:
        elsewhere = [name for name in _ELSEWHERE if is_true(in_effect(facts, name))]
    except NotChecked:
        return None
    return None if elsewhere else reason


def _on_torch(trace: Trace) -> bool:
    return any(path.name == "mhc-pre" and _TORCH_HC in path.detail for path in trace.paths)


def verify(facts: Facts, after: Facts) -> tuple[str, ...]:
    if not facts.arch.is_sm12x or after.trace is None:
        return ()
    still = ("mhc-pre still goes through torch operations",) if _on_torch(after.trace) else ()
    return still + shared.still_on(after.trace, ("mhc-pre",), _TORCH_HC)


_HC_BEFORE = """\
class DeepseekV4DecoderLayer(nn.Module):
    def hc_pre(self, x, hc_fn):
        if envs.SGLANG_OPT_DEEPGEMM_HC_PRENORM.get():
            mixes = deep_gemm(x)
        else:
            x_flat, mixes = hc_pre_torch_impl(x, hc_fn)
        return x_flat, mixes
"""
_HC_AFTER = """\
class DeepseekV4DecoderLayer(nn.Module):
    def hc_pre(self, x, hc_fn):
        if envs.SGLANG_OPT_DEEPGEMM_HC_PRENORM.get():
            mixes = deep_gemm(x)
        else:
            # dsv4doctor FIX106: on tensor cores, float32 as two terms of bf16.
            try:
                from dsv4doctor.kernels.adapters.verified import (
                    verified,
                )
            except ImportError as error:
                raise RuntimeError(
                    f"SGLang is patched by dsv4doctor (FIX106), not importable here ({error}): "
                    "run `pip install dsv4doctor`, or with it `dsv4doctor fix --revert`"
                ) from error

            hc_mix = verified("dense_glue", "hc_pre_torch_impl")
            if hc_mix is not None:
                x_flat, mixes = hc_mix(x, hc_fn, self.rms_norm_eps)
            else:
                x_flat, mixes = hc_pre_torch_impl(x, hc_fn)
        return x_flat, mixes
"""
_BMM_BEFORE = """\
def fp8_paged_mqa_logits_torch_sm120(q_fp8):
    q = q_fp8[:, 0].to(torch.float32)
    score = torch.bmm(kv_value, q.transpose(1, 2))
    return score
"""
_BMM_AFTER = """\
def fp8_paged_mqa_logits_torch_sm120(q_fp8):
    q = q_fp8[:, 0].to(torch.float32)
    # dsv4doctor FIX106: values that came from FP8, exact in bf16.
    try:
        from dsv4doctor.kernels.adapters.verified import (
            verified,
        )
    except ImportError as error:
        raise RuntimeError(
            f"SGLang is patched by dsv4doctor (FIX106), not importable here ({error}): "
            "run `pip install dsv4doctor`, or with it `dsv4doctor fix --revert`"
        ) from error

    bmm = verified("dense_glue", "indexer_bmm")
    if bmm is not None:
        score = bmm(kv_value, q)
    else:
        score = torch.bmm(kv_value, q.transpose(1, 2))
    return score
"""
_BF16 = _BMM_BEFORE.replace("float32", "bfloat16")

FIX = Fix(
    id=ID,
    title="Small float32 products on bf16 tensor cores",
    rules=(),
    files=(MODEL, INDEXER),
    plan=plan,
    needed=needed,
    changes=shared.no_layer,
    changes_path=lambda path: (
        path.name == "mhc-pre"
        or shared.reaches(path, ("indexer-decode", "indexer-prefill"), _TORCH_INDEXER)
    ),
    verify=verify,
    verified_by="the trace of the hot paths: mHC's pre mixing reaches dsv4doctor's kernel",
    examples=(
        Example(
            "both in float32",
            {MODEL: _HC_BEFORE, INDEXER: _BMM_BEFORE},
            {MODEL: _HC_AFTER, INDEXER: _BMM_AFTER},
        ),
        Example("the indexer in bf16", {MODEL: _HC_BEFORE, INDEXER: _BF16}, {MODEL: _HC_AFTER}),
        Example("patched already", {MODEL: _HC_AFTER}, None, Present),
        Example(
            "called another way",
            {MODEL: _HC_BEFORE.replace("(x, hc_fn)\n        return", "(x)\n        return")},
            None,
            Refused,
        ),
        Example("no mHC", {MODEL: "x = 1\n"}, None, Absent),
    ),
)
