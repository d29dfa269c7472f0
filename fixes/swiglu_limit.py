"""FIX103: DeepSeek-V4's clamp reaches FlashInfer's CUTLASS MoE for NVFP4.

Looks for: the call of `cutlass_fused_moe` that computes NVFP4 experts, without `swiglu_limit`.
Writes: the three tensors that FlashInfer takes it in, made once when the layer's runner is made
and handed over in that call.  What is clamped are dequantised values, so the limit needs no
scaling.  0.5.21 and later pass it themselves.
"""

from __future__ import annotations

import libcst as cst
import libcst.matchers as m

from dsv4doctor.fixes import edit
from dsv4doctor.fixes.fix import (
    Absent,
    Change,
    Choice,
    Example,
    Fix,
    Outcome,
    Present,
    Refused,
    Sources,
)
from dsv4doctor.fixes.reached import NVFP4_METHOD, ROUTED, auto_is_routed
from dsv4doctor.models import Facts, Layer
from dsv4doctor.rules.common import call_text, described, is_nvfp4_cutlass
from dsv4doctor.verdicts import drops_clamp

ID = "FIX103"
METHOD = "sglang/srt/layers/quantization/modelopt_quant.py"
RUNNER = "sglang/srt/layers/moe/moe_runner/flashinfer_cutlass.py"
_PLACES = (
    (RUNNER, "_run_flashinfer_cutlass", "runner_config"),
    (METHOD, "ModelOptNvFp4FusedMoEMethod.apply", "moe_runner_config"),
)
"""Where NVFP4 experts are computed, newer releases first, and the runner's config there."""

_EXPECTED_CALL = """\
output = flashinfer_cutlass_fused_moe(
    ...,
    quant_scales=...,
    activation_type=...,
)[0]
"""
_EXPECTED_CREATE = """\
def create_moe_runner(self, layer, moe_runner_config):
    self.moe_runner_config = moe_runner_config
"""
_CALL = m.Call(func=m.Name("flashinfer_cutlass_fused_moe"))
_CREATE = m.SimpleStatementLine(
    body=[
        m.Assign(
            targets=[m.AssignTarget(m.Attribute(m.Name("self"), m.Name("moe_runner_config")))],
            value=m.Name("moe_runner_config"),
        )
    ]
)
_TENSORS = "swiglu_limit_tensors"


def nvfp4_call(sources: Sources) -> tuple[edit.Piece, cst.Call, str] | None:
    """The call that computes NVFP4 experts, and the name of the runner's config beside it."""
    for file, name, config in _PLACES:
        piece = edit.find_piece(sources, file, name)
        calls = piece.find(_CALL) if piece is not None else []
        if piece is not None and len(calls) == 1:
            assert isinstance(calls[0], cst.Call)
            return piece, calls[0], config
    return None


def passes_limit(sources: Sources) -> bool:
    """Whether that call hands the clamp over."""
    found = nvfp4_call(sources)
    return found is not None and "swiglu_limit" in found[0].source(found[1])


def plan(sources: Sources, choice: Choice) -> Outcome:
    present = edit.own_mark(sources, (RUNNER, METHOD), ID)
    if present is not None:
        return present
    create = edit.find_piece(sources, METHOD, "ModelOptNvFp4FusedMoEMethod.create_moe_runner")
    found = nvfp4_call(sources)
    if create is None or found is None:
        return _without(sources, create)
    piece, call, config = found
    if passes_limit(sources):
        limit = next(a for a in call.args if a.keyword and a.keyword.value == "swiglu_limit")
        return Present(piece.at(limit), "fixed upstream")
    words = {argument.keyword.value for argument in call.args if argument.keyword}
    if not {"quant_scales", "activation_type"} <= words or config not in piece.text:
        return edit.refused(piece, call, _EXPECTED_CALL, "the call of FlashInfer's MoE is another")
    stored = create.find(_CREATE)
    if len(stored) != 1:
        return edit.refused(create, None, _EXPECTED_CREATE, "the config is stored another way")
    made = create.replaced([(stored[0], edit.put_after(_MADE, create.newline))])
    changed = dict(sources)
    changed[create.file] = edit.with_piece(changed, create, made)
    again = nvfp4_call(changed)  # the first change may have moved it
    assert again is not None
    piece_now, call_now, _ = again
    new = piece_now.replaced([(call_now, _handed_over(piece_now, call_now, config))])
    changed[piece_now.file] = edit.with_piece(changed, piece_now, new)
    return Change(
        sources={file: changed[file] for file in {create.file, piece_now.file}},
        at=(piece.at(call),),
        summary="FlashInfer's CUTLASS MoE for NVFP4 gets the model's swiglu_limit.",
    )


def _without(sources: Sources, create: edit.Piece | None) -> Outcome:
    if create is not None:
        for file, name, _ in _PLACES:
            piece = edit.find_piece(sources, file, name)
            if piece is not None and "cutlass_fused_moe" in piece.text:
                return edit.refused(piece, None, _EXPECTED_CALL, "no single call of FlashInfer's")
    return Absent("this SGLang does not compute NVFP4 experts with FlashInfer's CUTLASS MoE")


_MADE = f"""\
# dsv4doctor {ID}: swiglu_limit, as FlashInfer's CUTLASS MoE takes it.
if moe_runner_config.swiglu_limit is not None:
    ones = torch.ones(
        layer.num_local_experts,
        dtype=torch.float32,
        device=layer.w13_weight.device,
    )
    moe_runner_config.{_TENSORS} = {{
        "swiglu_alpha": ones,
        "swiglu_beta": torch.zeros_like(ones),
        "swiglu_limit": ones * moe_runner_config.swiglu_limit,
    }}
"""


def _handed_over(piece: edit.Piece, call: cst.Call, config: str) -> edit.Edit:
    """The call with one more line of arguments behind its last one."""
    words = cst.parse_expression(f'getattr({config}, "{_TENSORS}", {{}})')

    def edited(node: cst.CSTNode) -> cst.CSTNode:
        assert isinstance(node, cst.Call)
        *rest, last = node.args
        between = next(
            arg.comma for arg in rest if isinstance(arg.comma, cst.Comma)
        )  # a line break and the arguments' indentation
        assert isinstance(between.whitespace_after, cst.ParenthesizedWhitespace)
        mark = cst.EmptyLine(
            indent=True,
            whitespace=between.whitespace_after.last_line,
            comment=cst.Comment(f"# dsv4doctor {ID}"),
        )
        ahead = between.with_changes(
            whitespace_after=between.whitespace_after.with_changes(empty_lines=[mark])
        )
        added = cst.Arg(value=words, star="**", comma=last.comma)
        return node.with_changes(args=[*rest, last.with_changes(comma=ahead), added])

    return edited


# ------------------------------------------------------------------------ who needs it


def _limit(facts: Facts) -> float | None:
    checkpoint = facts.snapshot.checkpoint
    limit = checkpoint.text_config.get("swiglu_limit") if checkpoint else None
    return limit if isinstance(limit, int | float) and limit else None


def changes(layer: Layer) -> bool:
    return False  # the same method, runner and kernel, with one more argument


def needed(facts: Facts) -> str | None:
    limit = _limit(facts)
    if limit is None or facts.trace is None:
        return None
    if any(_here(layer) for layer in _losing(facts)):
        return f"the model's swiglu_limit ({limit:g}) does not reach FlashInfer's CUTLASS MoE"
    on_routed = any(layer.runner_backend == ROUTED for layer in facts.trace.layers)
    if facts.arch.is_sm12x and auto_is_routed(facts) and on_routed:  # FIX102 moves them
        return (
            f'FIX102 makes flashinfer_cutlass of "auto" only where it gets swiglu_limit ({limit:g})'
        )
    return None


def _losing(facts: Facts) -> list[Layer]:
    """The layers whose kernel provably does not get the model's clamp."""
    if facts.trace is None or _limit(facts) is None:
        return []
    return [x for x in facts.trace.layers if drops_clamp(x, call_text(facts, x))]


def _here(layer: Layer) -> bool:
    """Whether the layer's kernel is called where this fix hands the clamp over."""
    site = layer.kernel.call_site if layer.kernel else None
    return is_nvfp4_cutlass(layer) and site is not None and site.file in (RUNNER, METHOD)


def verify(facts: Facts, after: Facts) -> tuple[str, ...]:
    before = {layer.name: layer for layer in facts.trace.layers} if facts.trace else {}
    losing = {layer.name for layer in _losing(facts) if _here(layer)}
    now = after.trace.layers if after.trace else ()
    wrong = [f"{name} is not built any more" for name in losing - {layer.name for layer in now}]
    for layer in now:
        was, text = before.get(layer.name), call_text(after, layer)
        site = described(layer.kernel.call_site if layer.kernel else None)
        if layer.error is not None:
            if was is not None and was.error is None and "swiglu" in layer.error.message:
                wrong.append(f"{layer.name} no longer runs: {layer.error.message}")
        elif is_nvfp4_cutlass(layer) and "swiglu_limit" not in text:
            wrong.append(f"{layer.name}: the call at {site} is not seen to pass swiglu_limit")
        elif layer.name in losing and drops_clamp(layer, text):
            wrong.append(f"{layer.name}: swiglu_limit does not reach the kernel called at {site}")
    return tuple(sorted(wrong))


def leaves(facts: Facts, outcome: Outcome) -> str | None:
    """The clamp that is lost in another kernel, and the flag that leads to this one."""
    lost = [layer for layer in _losing(facts) if not _here(layer)]
    if not lost:
        return None
    assert lost[0].kernel is not None
    kernel = lost[0].kernel.symbol.rpartition(".")[2]
    said = f"DSV107 stays open: {kernel} is called without swiglu_limit ({_limit(facts):g})"
    passing = {Change: " with FIX103 passes it", Present: " passes it"}.get(type(outcome))
    if passing is None or any(layer.quant_method != NVFP4_METHOD for layer in lost):
        return f"{said}; no fix is about that"
    return f"{said}; --moe-runner-backend flashinfer_cutlass{passing}"


# ------------------------------------------------------------------------ examples

_METHOD_BEFORE = """\
class ModelOptNvFp4FusedMoEMethod(FusedMoEMethodBase):
    def create_moe_runner(self, layer, moe_runner_config):
        self.moe_runner_config = moe_runner_config
        self.runner = MoeRunner(get_moe_runner_backend(), moe_runner_config)
"""
_METHOD_AFTER = """\
class ModelOptNvFp4FusedMoEMethod(FusedMoEMethodBase):
    def create_moe_runner(self, layer, moe_runner_config):
        self.moe_runner_config = moe_runner_config
        # dsv4doctor FIX103: swiglu_limit, as FlashInfer's CUTLASS MoE takes it.
        if moe_runner_config.swiglu_limit is not None:
            ones = torch.ones(
                layer.num_local_experts,
                dtype=torch.float32,
                device=layer.w13_weight.device,
            )
            moe_runner_config.swiglu_limit_tensors = {
                "swiglu_alpha": ones,
                "swiglu_beta": torch.zeros_like(ones),
                "swiglu_limit": ones * moe_runner_config.swiglu_limit,
            }
        self.runner = MoeRunner(get_moe_runner_backend(), moe_runner_config)
"""
_RUN_BEFORE = """\
def _run_flashinfer_cutlass(*, dispatch_output, quant_info, runner_config):
    output = flashinfer_cutlass_fused_moe(
        input=x,
        quant_scales=quant_scales,
        activation_type=_activation_type(runner_config),
        enable_alltoall=enable_alltoall,
    )[0]
    return output
"""
_RUN_AFTER = """\
def _run_flashinfer_cutlass(*, dispatch_output, quant_info, runner_config):
    output = flashinfer_cutlass_fused_moe(
        input=x,
        quant_scales=quant_scales,
        activation_type=_activation_type(runner_config),
        enable_alltoall=enable_alltoall,
        # dsv4doctor FIX103
        **getattr(runner_config, "swiglu_limit_tensors", {}),
    )[0]
    return output
"""


def _in_method(function: str) -> str:
    own = function.replace("def _run_flashinfer_cutlass(*, ", "def apply(self, ")
    own = own.replace("runner_config", "moe_runner_config")
    return "".join(f"    {line}" for line in own.splitlines(keepends=True))


EXAMPLES = (
    Example(
        "a runner of its own",
        before={METHOD: _METHOD_BEFORE, RUNNER: _RUN_BEFORE},
        after={METHOD: _METHOD_AFTER, RUNNER: _RUN_AFTER},
    ),
    Example(
        "the call in the method",
        before={METHOD: _METHOD_BEFORE + "\n" + _in_method(_RUN_BEFORE)},
        after={METHOD: _METHOD_AFTER + "\n" + _in_method(_RUN_AFTER)},
    ),
    Example(
        "passed upstream",
        before={
            METHOD: _METHOD_BEFORE,
            RUNNER: _RUN_BEFORE.replace(
                "quant_scales=quant_scales,", "quant_scales=quant_scales, swiglu_limit=limit,"
            ),
        },
        after=None,
        outcome=Present,
    ),
    Example(
        "another call",
        before={METHOD: _METHOD_BEFORE, RUNNER: _RUN_BEFORE.replace("activation_type", "act")},
        after=None,
        outcome=Refused,
    ),
    Example("no NVFP4 experts", before={METHOD: "x = 1\n"}, after=None, outcome=Absent),
)

FIX = Fix(
    id=ID,
    title="swiglu_limit for NVFP4 experts on FlashInfer's CUTLASS MoE",
    rules=("DSV107",),
    files=(METHOD, RUNNER),
    plan=plan,
    needed=needed,
    changes=changes,
    verify=verify,
    verified_by=(
        "the trace: the layers build their tensors, and the call that they reach passes them"
    ),
    examples=EXAMPLES,
    leaves=leaves,
)
