"""FIX101: the draft's MXFP4 experts of a hybrid NVFP4 checkpoint on a kernel that the GPU has.

Looks for: `HybridFp8NvFp4Config.get_quant_method`, which answers every excluded FusedMoE with
`Mxfp4FlashinferTrtllmMoEMethod`, SM100's.  Writes: in front of that, for sm_90 and sm_12x, the
choice that `Fp8Config.get_quant_method` has.  It goes by the backend that is in force while the
draft is built, which is --speculative-moe-runner-backend's.

Which method gets the ids of other ranks' experts is decided by that backend and not by the method:
FlashInfer's backends keep global ids, the others make them local (and 0.5.23 asks the method).
CUTLASS wants global ids, Marlin local ones; ours takes both.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Sequence

import libcst as cst
import libcst.matchers as m

from dsv4doctor.fixes import draft_ways, edit
from dsv4doctor.fixes.draft_ways import CUTLASS, MARLIN, Way, cutlass_takes_sm12x, ways_of
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
from dsv4doctor.fixes.reached import not_moved
from dsv4doctor.models import Facts, Layer, Role, StoredFormat

ID = "FIX101"
_FOLDER = "sglang/srt/layers/quantization/"
HYBRID = _FOLDER + "modelopt_quant.py"
FP8 = _FOLDER + "fp8.py"
SM100_METHOD = "Mxfp4FlashinferTrtllmMoEMethod"

_EXPECTED = """\
if self.is_fp4_experts:
    from sglang.srt.layers.quantization.fp8 import Fp8MoEMethod
    from sglang.srt.layers.quantization.mxfp4_flashinfer_trtllm_moe import (
        Mxfp4FlashinferTrtllmMoEMethod,
    )

    return Mxfp4FlashinferTrtllmMoEMethod(Fp8MoEMethod(self), prefix=prefix)
"""
_RETURN = m.SimpleStatementLine(
    body=[
        m.Return(
            m.Call(
                func=m.Name(SM100_METHOD),
                args=[
                    m.Arg(m.Call(func=m.Name("Fp8MoEMethod"), args=[m.Arg(m.Name("self"))])),
                    m.Arg(m.Name("prefix")),
                ],
            )
        )
    ]
)
_IMPORT = m.SimpleStatementLine(body=[m.ImportFrom()])
_BRANCH = m.If(test=m.Attribute(m.Name("self"), m.Name("is_fp4_experts")))
_BRANCH_AS_KNOWN = m.If(
    test=m.Attribute(m.Name("self"), m.Name("is_fp4_experts")),
    body=m.IndentedBlock(body=[m.AtLeastN(_IMPORT, n=1), _RETURN]),
    orelse=None,
)
_ARCH_WORDS = {
    "get_platform", "is_sm90_supported", "is_sm120_supported", "is_sm100_supported",
    "Mxfp4FlashinferCutlassMoEMethod", "Mxfp4MarlinMoEMethod",
}  # fmt: skip


def plan(sources: Sources, choice: Choice) -> Outcome:
    present = edit.own_mark(sources, [HYBRID], ID)
    if present is not None:
        return present
    piece = edit.find_piece(sources, HYBRID, "HybridFp8NvFp4Config.get_quant_method")
    if piece is None:
        return Absent("this SGLang has no HybridFp8NvFp4Config")
    branches = piece.find(_BRANCH)
    sending = [branch for branch in branches if m.findall(branch, m.Name(SM100_METHOD))]
    if not sending:
        return Absent(f"excluded experts do not get {SM100_METHOD} here")
    [branch, *more] = sending
    fixed = _arch_test(piece, branch)
    if fixed is not None:
        return fixed
    if more or not m.matches(branch, _BRANCH_AS_KNOWN):
        return edit.refused(piece, branch, _EXPECTED, "the branch for draft experts is another")
    target = _target(sources, choice)
    if isinstance(target, Refused):
        return target
    body = branch.body.body  # type: ignore[attr-defined]
    ways = ways_of(sources, target)
    inserted = _code(sources, ways)
    first_sm100 = next(line for line in body if m.findall(line, m.Name(SM100_METHOD)))
    new = piece.replaced([(first_sm100, edit.put_before(inserted, piece.newline))])
    return Change(
        sources={HYBRID: edit.with_piece(sources, piece, new)},
        at=(piece.at(body[-1]),),
        summary=(
            f"On sm_90 and sm_12x the draft's MXFP4 experts get, instead of {SM100_METHOD}, "
            f"{draft_ways.listed(ways)}, by --speculative-moe-runner-backend, or by the main "
            "model's backend where that is not given."
        ),
        target=target,
        aim=lambda trace, auto: draft_ways.aim(ways, trace, auto),
    )


def _arch_test(piece: edit.Piece, branch: cst.CSTNode) -> Present | None:
    for name in piece.find(m.Name(m.MatchIfTrue(_ARCH_WORDS.__contains__))):
        if piece.lines_of(branch)[0] <= piece.lines_of(name)[0]:
            return Present(piece.at(name), "fixed upstream")
    return None


def _target(sources: Sources, choice: Choice) -> str | Refused:
    cutlass, marlin = cutlass_takes_sm12x(sources), MARLIN in sources
    if choice.kernel == "auto":
        return "cutlass" if cutlass else "marlin" if marlin else "triton"
    if choice.kernel == "cutlass" and not cutlass:
        return Refused(
            CUTLASS,
            "a form of Mxfp4FlashinferCutlassMoEMethod for sm_12x",
            "one for sm_90 only" if CUTLASS in sources else "no such file",
            "--kernel cutlass: this SGLang's CUTLASS method does not take sm_12x; "
            "marlin and triton do",
        )
    if choice.kernel == "marlin" and not marlin:
        return Refused(
            MARLIN, "Mxfp4MarlinMoEMethod", "no such file", "--kernel marlin: there is none here"
        )
    return choice.kernel


def _borrowed_fp8_needs_config(sources: Sources) -> bool:
    """Whether loading through a borrowed Fp8MoEMethod reads a config that it was never given.

    0.5.18 does, under the trtllm backends; later releases ask whether the runner is its own.
    """
    tree = edit.parsed(sources, FP8)
    defined = {getattr(node, "name", ""): node for node in getattr(tree, "body", ())}
    body = getattr(defined.get("Fp8MoEMethod"), "body", ())
    methods = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
    loading = methods.get("process_weights_after_loading")
    if loading is None:
        return False
    for condition in ast.walk(loading):
        if isinstance(condition, ast.If) and "self" not in edit.names_in(condition.test):
            called = {
                name for line in condition.body for name in edit.names_in(line) if name in methods
            }
            if any("self.moe_runner_config" in ast.unparse(methods[name]) for name in called):
                return True
    return False


_CUTLASS_RETURN = """\
from sglang.srt.layers.quantization.mxfp4_flashinfer_cutlass_moe import (
    Mxfp4FlashinferCutlassMoEMethod,
)

return Mxfp4FlashinferCutlassMoEMethod(fp8_method, prefix=prefix)
"""
_MARLIN_RETURN = """\
from sglang.srt.layers.quantization.mxfp4_marlin_moe import (
    Mxfp4MarlinMoEMethod,
)

return Mxfp4MarlinMoEMethod(fp8_method, prefix=prefix)
"""
_OURS_RETURN = edit.from_ours(ID, "moe_mxfp4", "mxfp4_moe_method") + (
    "\nreturn mxfp4_moe_method(fp8_method, prefix)\n"
)


_RETURNS = {"cutlass": _CUTLASS_RETURN, "marlin": _MARLIN_RETURN, "triton": _OURS_RETURN}


def _predicates(missing: set[str]) -> list[str]:
    """An import of what the module has not imported: a local one hides the module's name."""
    first, *more = sorted(missing, key=len) or [""]
    if not first:
        return []
    if not more:
        return [f"from sglang.srt.utils.common import {first}"]
    names = "".join(f"    {name},\n" for name in (first, *more))
    return [f"from sglang.srt.utils.common import (\n{names})"]


def _code(sources: Sources, ways: Sequence[Way]) -> str:
    names = edit.imported_names(edit.parsed(sources, HYBRID))
    ahead = []
    if "get_moe_runner_backend" not in names:
        ahead.append("from sglang.srt.layers.moe.utils import get_moe_runner_backend")
    lines = [f"# dsv4doctor {ID}: TRT-LLM's MXFP4 kernels exist for SM100 only."]
    if "get_platform" in names:
        lines.append("if get_platform().is_sm90 or get_platform().is_sm120:")
    else:
        ahead += _predicates({"is_sm90_supported", "is_sm120_supported"} - names)
        lines.append("if is_sm90_supported() or is_sm120_supported():")
    body = ["fp8_method = Fp8MoEMethod(self)"]
    if _borrowed_fp8_needs_config(sources):
        body.append("fp8_method.moe_runner_config = layer.moe_runner_config")
    body.append("backend = get_moe_runner_backend()")
    if any("global_ids" in way.condition for way in ways):
        body.append('global_ids = backend.value.startswith("flashinfer")')
    for way in ways:
        code = _RETURNS[way.target].rstrip()
        if way.condition:
            body += [f"if {way.condition}:", textwrap.indent(code, "    ")]
        else:
            body.append(code)
    lines.append(textwrap.indent("\n".join(body), "    "))
    return "\n".join([*ahead, "", *lines]) + "\n\n"


# ------------------------------------------------------------------------ who needs it


def changes(layer: Layer) -> bool:
    return layer.role is Role.DRAFT and layer.quant_method == SM100_METHOD


def _concerns(facts: Facts) -> bool:
    return facts.arch.is_sm12x or facts.arch.major == 9


def needed(facts: Facts) -> str | None:
    if not _concerns(facts):
        return None
    if facts.trace is not None:
        layers = [layer for layer in facts.trace.layers if changes(layer)]
        if not layers:
            return None
        return (
            f"the draft's experts resolve to {SM100_METHOD}, which has no {facts.arch.name} kernel"
        )
    checkpoint, launch = facts.snapshot.checkpoint, facts.snapshot.launch
    if checkpoint is None or launch is None or "--speculative-algorithm" not in launch.all_flags:
        return None
    formats = (checkpoint.declared_main, checkpoint.declared_draft)
    if formats != (StoredFormat.NVFP4, StoredFormat.MXFP4):
        return None
    return "a hybrid NVFP4 checkpoint is served with its MXFP4 draft"


def verify(facts: Facts, after: Facts) -> tuple[str, ...]:
    if facts.trace is None or after.trace is None or not _concerns(facts):
        return ()
    before, now = facts.trace.of(Role.DRAFT), after.trace.of(Role.DRAFT)
    return not_moved(before, now, changes, f"still gets {SM100_METHOD}")


# ------------------------------------------------------------------------ examples

_HEAD = """\
from sglang.srt.layers.moe.utils import get_moe_runner_backend
from sglang.srt.runtime_context import get_platform


class HybridFp8NvFp4Config(Fp8Config):
    def get_quant_method(self, layer, prefix):
        if isinstance(layer, FusedMoE):
            # Fall back to MXFP4 for MTP MoE layers
            if self.is_fp4_experts:
                from sglang.srt.layers.quantization.fp8 import Fp8MoEMethod
"""
_TAIL = """\
                from sglang.srt.layers.quantization.mxfp4_flashinfer_trtllm_moe import (
                    Mxfp4FlashinferTrtllmMoEMethod,
                )

                return Mxfp4FlashinferTrtllmMoEMethod(Fp8MoEMethod(self), prefix=prefix)
        return super().get_quant_method(layer, prefix)
"""
_OURS = textwrap.indent(_OURS_RETURN, " " * 24)
_TO_CUTLASS = f"""\
                # dsv4doctor FIX101: TRT-LLM's MXFP4 kernels exist for SM100 only.
                if get_platform().is_sm90 or get_platform().is_sm120:
                    fp8_method = Fp8MoEMethod(self)
                    backend = get_moe_runner_backend()
                    global_ids = backend.value.startswith("flashinfer")
                    if backend.is_triton():
{_OURS.rstrip()}
                    if not global_ids:
                        from sglang.srt.layers.quantization.mxfp4_marlin_moe import (
                            Mxfp4MarlinMoEMethod,
                        )

                        return Mxfp4MarlinMoEMethod(fp8_method, prefix=prefix)
                    from sglang.srt.layers.quantization.mxfp4_flashinfer_cutlass_moe import (
                        Mxfp4FlashinferCutlassMoEMethod,
                    )

                    return Mxfp4FlashinferCutlassMoEMethod(fp8_method, prefix=prefix)
"""
_TO_MARLIN = f"""\
                from sglang.srt.utils.common import (
                    is_sm90_supported,
                    is_sm120_supported,
                )

                # dsv4doctor FIX101: TRT-LLM's MXFP4 kernels exist for SM100 only.
                if is_sm90_supported() or is_sm120_supported():
                    fp8_method = Fp8MoEMethod(self)
                    fp8_method.moe_runner_config = layer.moe_runner_config
                    backend = get_moe_runner_backend()
                    global_ids = backend.value.startswith("flashinfer")
                    if backend.is_triton() or (global_ids and layer.moe_ep_size > 1):
{_OURS.rstrip()}
                    from sglang.srt.layers.quantization.mxfp4_marlin_moe import (
                        Mxfp4MarlinMoEMethod,
                    )

                    return Mxfp4MarlinMoEMethod(fp8_method, prefix=prefix)
"""
_READS_CONFIG = """\
class Fp8MoEMethod:
    def process_weights_after_loading(self, layer):
        if get_moe_runner_backend().is_flashinfer_trtllm_routed():
            self._prepare(layer)

    def _prepare(self, layer):
        return self.moe_runner_config.gemm1_alpha
"""
_OLD_HEAD = _HEAD.replace("from sglang.srt.runtime_context import get_platform\n", "")
_BOTH_FORMS = {CUTLASS: "form = is_sm120_supported()\n", MARLIN: "", FP8: ""}
_SM90_FORM = {CUTLASS: "", MARLIN: "", FP8: _READS_CONFIG}

EXAMPLES = (
    Example(
        "a CUTLASS method that takes sm_12x",
        before={HYBRID: _HEAD + _TAIL, **_BOTH_FORMS},
        after={HYBRID: _HEAD + "\n" + _TO_CUTLASS + "\n" + _TAIL},
    ),
    Example(
        "Marlin only, and a borrowed FP8 method that reads a config",
        before={HYBRID: _OLD_HEAD + _TAIL, **_SM90_FORM},
        after={HYBRID: _OLD_HEAD + _TO_MARLIN + "\n" + _TAIL},
    ),
    Example(
        "CUTLASS asked for and not there",
        before={HYBRID: _HEAD + _TAIL, **_SM90_FORM},
        after=None,
        outcome=Refused,
        choice=Choice("cutlass"),
    ),
    Example(
        "upstream tests the arch itself",
        before={
            HYBRID: _HEAD
            + """\
                if get_platform().is_sm120:
                    return Mxfp4FlashinferCutlassMoEMethod(Fp8MoEMethod(self), prefix=prefix)
"""
            + _TAIL
        },
        after=None,
        outcome=Present,
    ),
    Example(
        "another call",
        before={HYBRID: (_HEAD + _TAIL).replace("prefix=prefix", "prefix=prefix, layer=layer")},
        after=None,
        outcome=Refused,
    ),
    Example("no hybrid checkpoints", before={HYBRID: "x = 1\n"}, after=None, outcome=Absent),
)

FIX = Fix(
    id=ID,
    title="Draft experts of a hybrid NVFP4 checkpoint on a kernel that the GPU has",
    rules=("DSV102", "DSV103"),
    files=(HYBRID, CUTLASS, MARLIN, FP8),
    plan=plan,
    needed=needed,
    changes=changes,
    verify=verify,
    verified_by=(
        "the trace: every draft layer that had the TRT-LLM method gets another one, loads its "
        "weights and reaches a kernel"
    ),
    examples=EXAMPLES,
)
