"""FIX102: `--moe-runner-backend auto` for the NVFP4 experts of a hybrid checkpoint on sm_12x.

Looks for: where a DeepSeek-V4 launch with NVFP4 experts turns "auto" into
"flashinfer_trtllm_routed", SM100's, whatever the GPU.  Writes: another backend for sm_12x.
FlashInfer's CUTLASS where this tree hands it the model's swiglu_limit (FIX103 sees to that where
SGLang does not), else "triton", which in a hybrid checkpoint on sm_12x then means dsv4doctor's
method: SGLang's own answer to it drops the clamp (0.5.14, 0.5.15) or raises.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass

import libcst as cst
import libcst.matchers as m

from dsv4doctor.fixes import edit, swiglu_limit
from dsv4doctor.fixes.fix import (
    Absent,
    Aim,
    Asks,
    Change,
    Choice,
    Example,
    Fix,
    Outcome,
    Present,
    Refused,
    Sources,
)
from dsv4doctor.fixes.reached import NVFP4_METHOD, ROUTED, auto_is_routed, not_moved
from dsv4doctor.models import Facts, Layer, Role, Trace

ID = "FIX102"
METHOD = swiglu_limit.METHOD
RUNNER = swiglu_limit.RUNNER
MARLIN = "sglang/srt/layers/moe/moe_runner/marlin.py"
_PLACES = (
    ("sglang/srt/arg_groups/model_overrides/deepseek_v4.py", "_deepseek_v4_overrides"),
    ("sglang/srt/arg_groups/overrides.py", "_deepseek_v4_overrides"),
    ("sglang/srt/arg_groups/deepseek_v4_hook.py", "apply_deepseek_v4_defaults"),
)
_BACKENDS = {"cutlass": "flashinfer_cutlass", "marlin": "marlin", "triton": "triton"}

_EXPECTED = """\
if ...nvfp4_moe_meta is not None:
    overrides["moe_runner_backend"] = "flashinfer_trtllm_routed"
    logger.info(
        "Use flashinfer_trtllm_routed as MoE runner backend for "
        f"{model_arch} hybrid FP8+NVFP4 checkpoint."
    )
"""
_VALUE = m.SimpleString(f'"{ROUTED}"')
_ASSIGN = m.SimpleStatementLine(body=[m.Assign(targets=[m.AssignTarget()], value=_VALUE)])
_LOG = m.SimpleStatementLine(body=[m.Expr(m.Call(func=m.Attribute(m.Name("logger"))))])
_BRANCH = m.If(test=m.OneOf(m.Comparison(), m.BooleanOperation()), body=m.IndentedBlock())
_BODY = m.IndentedBlock(body=[_ASSIGN, _LOG])
_EXPECTED_METHOD = """\
if not self.nvfp4_config.is_layer_excluded(prefix):
    return ModelOptNvFp4FusedMoEMethod(self.nvfp4_config)
"""
_METHOD_RETURN = m.SimpleStatementLine(
    body=[
        m.Return(
            m.Call(
                func=m.Name("ModelOptNvFp4FusedMoEMethod"),
                args=[m.Arg(m.Attribute(m.Name("self"), m.Name("nvfp4_config")))],
            )
        )
    ]
)


@dataclass(frozen=True)
class _Place:
    piece: edit.Piece
    branch: cst.If


def plan(sources: Sources, choice: Choice) -> Outcome:
    files = [file for file, _ in _PLACES]
    present = edit.own_mark(sources, files, ID)
    if present is not None:
        return present
    found = _place(sources)
    if not isinstance(found, _Place):
        return found
    piece, branch = found.piece, found.branch
    target = _target(sources, choice)
    if isinstance(target, Refused):
        return target
    changed = dict(sources)
    names = edit.imported_names(edit.parsed(sources, piece.file))
    edits = [
        (branch.body.body[0], edit.in_place(_assignment(piece, branch, names, target))),
        *((text, _log_text) for text in _log_texts(piece, branch)),
    ]
    changed[piece.file] = edit.with_piece(sources, piece, piece.replaced(edits))
    if target == "triton":
        refused = _send_to_ours(changed)
        if refused is not None:
            return refused
    return Change(
        sources={file: text for file, text in changed.items() if text != sources[file]},
        at=(piece.at(branch.body.body[0]),),
        summary=(
            f'On sm_12x "auto" becomes {_BACKENDS[target]} for NVFP4 experts instead of {ROUTED}'
            + (
                ", which a hybrid checkpoint answers with dsv4doctor's Triton method."
                if target == "triton"
                else "."
            )
        ),
        target=target,
        asks=Asks("moe_nvfp4", True) if target == "triton" else None,
        auto=_BACKENDS[target],
        aim=aim_of(target),
    )


def aim_of(target: str) -> Callable[[Trace, str | None], Aim]:
    """What "auto" becomes is what the main layers get, in every launch that says "auto"."""
    aim = Aim(Role.MAIN, target, NVFP4_METHOD, runner=_BACKENDS[target])
    if target == "triton":
        ours = "Dsv4DoctorModelOptNvFp4MoEMethod"
        aim = Aim(Role.MAIN, target, ours, operation="moe_nvfp4")
    return lambda trace, auto: aim


def _place(sources: Sources) -> _Place | Outcome:
    for file, name in _PLACES:
        piece = edit.find_piece(sources, file, name)
        if piece is None or "nvfp4_moe_meta" not in piece.text:
            continue
        branches = [
            branch
            for branch in piece.find(_BRANCH)
            if isinstance(branch, cst.If) and m.findall(branch.test, m.Name("nvfp4_moe_meta"))
        ]
        with_it = [branch for branch in branches if m.findall(branch.body, _VALUE)]
        if not with_it:
            return Absent(f'"auto" does not become {ROUTED} for NVFP4 experts here')
        branch = with_it[0]
        arch = m.Name(m.MatchIfTrue(lambda name: name.startswith("is_sm1")))
        tests = [*m.findall(branch.test, arch), *m.findall(branch.body, arch)]
        if tests:
            return Present(piece.at(tests[0]), "fixed upstream")
        if not m.matches(branch.body, _BODY):
            return edit.refused(piece, branch, _EXPECTED, "the branch for NVFP4 is another")
        return _Place(piece, branch)
    return Absent("this SGLang chooses no backend for NVFP4 experts of DeepSeek-V4")


def _target(sources: Sources, choice: Choice) -> str | Refused:
    honours = swiglu_limit.passes_limit(sources)
    if choice.kernel == "auto":
        return "cutlass" if honours else "triton"
    if choice.kernel == "cutlass" and not honours:
        return Refused(
            RUNNER if RUNNER in sources else METHOD,
            "flashinfer_cutlass_fused_moe(..., swiglu_limit=...)",
            "a call without swiglu_limit",
            "--kernel cutlass: its call drops swiglu_limit here; apply FIX103 with it",
        )
    if choice.kernel == "marlin" and "swiglu_limit" not in sources.get(MARLIN, ""):
        return Refused(
            MARLIN, "a runner that takes swiglu_limit", "none", "--kernel marlin: no clamp there"
        )
    return choice.kernel


def _sm12x(names: set[str]) -> tuple[str, str]:
    """(statements that it needs, the condition)."""
    if "get_platform" in names:
        return "", "get_platform().is_sm120"
    ahead = (
        ""
        if "is_sm120_supported" in names
        else ("from sglang.srt.utils.common import is_sm120_supported\n\n")
    )
    return ahead, "is_sm120_supported()"


def _assignment(piece: edit.Piece, branch: cst.If, names: set[str], target: str) -> str:
    ahead, condition = _sm12x(names)
    line = branch.body.body[0]
    assert isinstance(line, cst.SimpleStatementLine)
    assign = line.body[0]
    assert isinstance(assign, cst.Assign)
    left = piece.module.code_for_node(assign.targets[0].target)
    return (
        f"{ahead}# dsv4doctor {ID}: TRT-LLM's NVFP4 kernels exist for SM100 only.\n"
        "moe_runner_backend = (\n"
        f'    "{_BACKENDS[target]}"\n'
        f"    if {condition}\n"
        f'    else "{ROUTED}"\n'
        ")\n"
        f"{left} = moe_runner_backend\n"
    )


def _log_texts(piece: edit.Piece, branch: cst.If) -> list[cst.CSTNode]:
    """The string in the log line behind it that names the backend."""
    named = m.SimpleString(m.MatchIfTrue(lambda text: f"Use {ROUTED} " in text))
    return list(m.findall(branch.body.body[1], named))


def _log_text(node: cst.CSTNode) -> cst.CSTNode:
    assert isinstance(node, cst.SimpleString)
    return cst.parse_expression("f" + node.value.replace(ROUTED, "{moe_runner_backend}"))


_OURS = edit.from_ours(ID, "moe_nvfp4", "nvfp4_moe_method") + (
    "\nreturn nvfp4_moe_method(self.nvfp4_config)\n"
)


def _send_to_ours(changed: dict[str, str]) -> Outcome | None:
    """Adds our method to the hybrid configuration; an outcome where that cannot be."""
    piece = edit.find_piece(changed, METHOD, "HybridFp8NvFp4Config.get_quant_method")
    if piece is None:
        return Absent("this SGLang has no HybridFp8NvFp4Config")
    returns = piece.find(_METHOD_RETURN)
    if len(returns) != 1:
        return edit.refused(
            piece, None, _EXPECTED_METHOD, "NVFP4 experts get their method elsewhere"
        )
    ahead, condition = _sm12x(edit.imported_names(edit.parsed(changed, METHOD)))
    code = (
        f"{ahead}# dsv4doctor {ID}: SGLang's triton runner has no NVFP4 kernel.\n"
        f"if {condition} and get_moe_runner_backend().is_triton():\n"
        f"{textwrap.indent(_OURS, '    ')}"
    )
    new = piece.replaced([(returns[0], edit.put_before(code, piece.newline))])
    changed[METHOD] = edit.with_piece(changed, piece, new)
    return None


# ------------------------------------------------------------------------ who needs it


def _on_routed(layer: Layer) -> bool:
    return layer.quant_method == NVFP4_METHOD and layer.runner_backend == ROUTED


def changes(layer: Layer) -> bool:
    """Beside those on the runner: the draft of 0.5.18, which fails to load under it only."""
    return _on_routed(layer) or (
        layer.error is not None and "moe_runner_config" in layer.error.message
    )


def needed(facts: Facts) -> str | None:
    if not facts.arch.is_sm12x or facts.trace is None:
        return None
    if not auto_is_routed(facts) or not any(map(_on_routed, facts.trace.of(Role.MAIN))):
        return None
    return f'"auto" becomes {ROUTED}, which has no {facts.arch.name} kernel'


def verify(facts: Facts, after: Facts) -> tuple[str, ...]:
    if not facts.arch.is_sm12x or facts.trace is None or after.trace is None:
        return ()
    before, now = facts.trace.of(Role.MAIN), after.trace.of(Role.MAIN)
    return not_moved(before, now, _on_routed, f"is still on {ROUTED}")


# ------------------------------------------------------------------------ examples

_HOOK, _CALLS = (
    _PLACES[0][0],
    {
        "with": "def _run_flashinfer_cutlass(runner_config):\n"
        "    flashinfer_cutlass_fused_moe(swiglu_limit=quant_info.swiglu_limit)\n",
        "without": "def _run_flashinfer_cutlass(runner_config):\n"
        "    flashinfer_cutlass_fused_moe(quant_scales=quant_scales)\n",
    },
)
_BEFORE = """\
from sglang.srt.runtime_context import get_platform


def _deepseek_v4_overrides(server_args, hf_config):
    if cfg.moe_runner_backend == "auto":
        if model_config.nvfp4_moe_meta is not None:
            overrides["moe_runner_backend"] = "flashinfer_trtllm_routed"
            logger.info(
                "Use flashinfer_trtllm_routed as MoE runner backend for "
                f"{model_arch} hybrid FP8+NVFP4 checkpoint."
            )
        elif get_platform().is_sm100:
            overrides["moe_runner_backend"] = "flashinfer_mxfp4"
"""
_AFTER = """\
from sglang.srt.runtime_context import get_platform


def _deepseek_v4_overrides(server_args, hf_config):
    if cfg.moe_runner_backend == "auto":
        if model_config.nvfp4_moe_meta is not None:
            # dsv4doctor FIX102: TRT-LLM's NVFP4 kernels exist for SM100 only.
            moe_runner_backend = (
                "flashinfer_cutlass"
                if get_platform().is_sm120
                else "flashinfer_trtllm_routed"
            )
            overrides["moe_runner_backend"] = moe_runner_backend
            logger.info(
                f"Use {moe_runner_backend} as MoE runner backend for "
                f"{model_arch} hybrid FP8+NVFP4 checkpoint."
            )
        elif get_platform().is_sm100:
            overrides["moe_runner_backend"] = "flashinfer_mxfp4"
"""
_HYBRID = """\
from sglang.srt.runtime_context import get_platform


class HybridFp8NvFp4Config(Fp8Config):
    def get_quant_method(self, layer, prefix):
        if isinstance(layer, FusedMoE):
            if not self.nvfp4_config.is_layer_excluded(prefix):
                return ModelOptNvFp4FusedMoEMethod(self.nvfp4_config)
        return super().get_quant_method(layer, prefix)
"""
_HYBRID_AFTER = f"""\
from sglang.srt.runtime_context import get_platform


class HybridFp8NvFp4Config(Fp8Config):
    def get_quant_method(self, layer, prefix):
        if isinstance(layer, FusedMoE):
            if not self.nvfp4_config.is_layer_excluded(prefix):
                # dsv4doctor FIX102: SGLang's triton runner has no NVFP4 kernel.
                if get_platform().is_sm120 and get_moe_runner_backend().is_triton():
{textwrap.indent(_OURS, " " * 20).rstrip()}
                return ModelOptNvFp4FusedMoEMethod(self.nvfp4_config)
        return super().get_quant_method(layer, prefix)
"""

EXAMPLES = (
    Example(
        "CUTLASS honours the clamp",
        before={_HOOK: _BEFORE, RUNNER: _CALLS["with"]},
        after={_HOOK: _AFTER},
    ),
    Example(
        "CUTLASS drops the clamp",
        before={_HOOK: _BEFORE, RUNNER: _CALLS["without"], METHOD: _HYBRID},
        after={_HOOK: _AFTER.replace("flashinfer_cutlass", "triton"), METHOD: _HYBRID_AFTER},
    ),
    Example(
        "Marlin asked for",
        before={_HOOK: _BEFORE, RUNNER: _CALLS["without"], MARLIN: "limit = c.swiglu_limit\n"},
        after={_HOOK: _AFTER.replace("flashinfer_cutlass", "marlin")},
        choice=Choice("marlin"),
    ),
    Example(
        "CUTLASS asked for and it drops the clamp",
        before={_HOOK: _BEFORE, RUNNER: _CALLS["without"]},
        after=None,
        outcome=Refused,
        choice=Choice("cutlass"),
    ),
    Example(
        "upstream asks for the arch",
        before={_HOOK: _BEFORE.replace("is not None:", "is not None and get_platform().is_sm100:")},
        after=None,
        outcome=Present,
    ),
    Example(
        "another branch",
        before={_HOOK: _BEFORE.replace("logger.info(", "tell(")},
        after=None,
        outcome=Refused,
    ),
    Example("no NVFP4 experts", before={_HOOK: "x = 1\n"}, after=None, outcome=Absent),
)
FIX = Fix(
    id=ID,
    title='"auto" for the NVFP4 experts of a hybrid checkpoint on sm_12x',
    rules=("DSV101",),
    files=(*(file for file, _ in _PLACES), METHOD, RUNNER, MARLIN),
    plan=plan,
    needed=needed,
    changes=changes,
    verify=verify,
    verified_by=(
        "the trace: every main layer that was on flashinfer_trtllm_routed is on another runner, "
        "loads its weights and reaches a kernel"
    ),
    examples=EXAMPLES,
)
