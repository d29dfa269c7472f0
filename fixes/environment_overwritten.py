"""FIX107: variables that the user set stay as they are on sm_12x.

Looks for: the `if` on sm_12x, where SGLang resolves a DeepSeek-V4 launch, that sets variables of
the indexer and of mHC (the block with SGLANG_FP8_PAGED_MQA_LOGITS_TORCH).  Writes: a guard
`if not envs.NAME.is_set():` around each assignment that has none.  0.5.20 and later guard all that
they let a user choose.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

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
from dsv4doctor.models import Facts, Layer, Trace
from dsv4doctor.rules.common import same_value, set_by_user

ID = "FIX107"
FILES = ("sglang/srt/server_args.py", "sglang/srt/arg_groups/model_hook.py")
_KNOWN_BY = "SGLANG_FP8_PAGED_MQA_LOGITS_TORCH"
_EXPECTED = f"""\
if is_sm120_supported():
    envs.{_KNOWN_BY}.set(True)
"""

_SETTING = m.SimpleStatementLine(
    body=[
        m.Expr(
            m.Call(
                func=m.Attribute(
                    value=m.Attribute(value=m.Name("envs"), attr=m.Name()), attr=m.Name("set")
                ),
                args=[m.Arg()],
            )
        )
    ]
)
_SM120 = m.Call(func=m.Name("is_sm120_supported"), args=[]) | m.Attribute(
    value=m.Call(func=m.Name("get_platform"), args=[]), attr=m.Name("is_sm120")
)
_BLOCK = m.If(test=_SM120, body=m.IndentedBlock())
_GUARD = m.If(test=m.UnaryOperation(operator=m.Not(), expression=m.Call()), orelse=None)


def plan(sources: Sources, choice: Choice) -> Outcome:
    present = edit.own_mark(sources, FILES, ID)
    if present is not None:
        return present
    suspect: edit.Piece | None = None
    for file in FILES:
        for name in _functions(sources, file):
            piece = edit.find_piece(sources, file, name)
            if piece is None:
                continue
            block = next(filter(_is_it, piece.find(_BLOCK)), None)
            if block is not None:
                return _guarded(sources, piece, block)
            suspect = piece
    if suspect is None:
        return Absent("this SGLang sets no variables of the indexer on sm_12x")
    place = next(iter(suspect.find(m.Name(_KNOWN_BY))), None)
    return edit.refused(suspect, place, _EXPECTED, "it is not set under an `if` on sm_12x alone")


def _functions(sources: Sources, file: str) -> Iterator[str]:
    """The file's functions and methods that name the variable."""
    lines = edit.lines_in(sources.get(file, ""))
    at = [number for number, line in enumerate(lines, 1) if _KNOWN_BY in line]
    for scope in getattr(edit.parsed(sources, file), "body", ()):
        ahead = f"{scope.name}." if isinstance(scope, ast.ClassDef) else ""
        for node in scope.body if isinstance(scope, ast.ClassDef) else (scope,):
            if isinstance(node, ast.FunctionDef) and any(
                node.lineno <= line <= (node.end_lineno or 0) for line in at
            ):
                yield ahead + node.name


def _is_it(block: cst.CSTNode) -> bool:
    assert isinstance(block, cst.If)
    return any(
        _variable(line) == _KNOWN_BY
        for line in (*block.body.body, *(s for g in _guards(block) for s in g.body.body))
    )


def _guards(block: cst.If) -> list[cst.If]:
    return [
        line for line in block.body.body if isinstance(line, cst.If) and m.matches(line, _GUARD)
    ]


def _variable(line: cst.CSTNode) -> str | None:
    """NAME of a statement `envs.NAME.set(...)`."""
    found = m.extract(
        line,
        m.SimpleStatementLine(
            body=[
                m.Expr(
                    m.Call(
                        func=m.Attribute(
                            value=m.Attribute(
                                value=m.Name("envs"), attr=m.SaveMatchedNode(m.Name(), "name")
                            ),
                            attr=m.Name("set"),
                        )
                    )
                )
            ]
        ),
    )
    name = found["name"] if found else None
    return name.value if isinstance(name, cst.Name) else None


def _guarded(sources: Sources, piece: edit.Piece, block: cst.CSTNode) -> Outcome:
    assert isinstance(block, cst.If)
    bare = [line for line in block.body.body if m.matches(line, _SETTING)]
    names = [str(_variable(line)) for line in bare]
    if _KNOWN_BY not in names:
        guard = next(g for g in _guards(block) if _KNOWN_BY in map(_variable, g.body.body))
        rest = f", but for {' and '.join(names)}, which it forces" if names else ""
        return Present(piece.at(guard), "fixed upstream" + rest)
    edits = [(line, _guard(piece, line, number == 0)) for number, line in enumerate(bare)]
    return Change(
        sources={piece.file: edit.with_piece(sources, piece, piece.replaced(edits))},
        at=tuple(piece.at(line) for line in bare),
        summary=f"On sm_12x SGLang sets {', '.join(names)} only where they are not set already.",
    )


def _guard(piece: edit.Piece, line: cst.CSTNode, first: bool) -> edit.Edit:
    assert isinstance(line, cst.SimpleStatementLine)
    mark = f"# dsv4doctor {ID}: what the user set stays.\n" if first else ""
    code = piece.module.code_for_node(line.with_changes(leading_lines=[])).strip()
    new = f"{mark}if not envs.{_variable(line)}.is_set():\n    {code}\n"

    def guarded(node: cst.CSTNode) -> cst.CSTNode:
        assert isinstance(node, cst.SimpleStatementLine)
        first_line, *rest = edit.statements(new, piece.newline)
        assert isinstance(first_line, cst.If)
        lines = [*node.leading_lines, *first_line.leading_lines]
        return cst.FlattenSentinel([first_line.with_changes(leading_lines=lines), *rest])  # type: ignore[return-value]

    return guarded


# ------------------------------------------------------------------------ who needs it


def changes(layer: Layer) -> bool:
    return False


def _overruled(facts: Facts, trace: Trace | None) -> list[str]:
    """Variables that the launch sets and SGLang sets to something else."""
    names = []
    for name, (before, after) in (trace.environment_overwritten if trace else {}).items():
        wanted = set_by_user(facts, name)
        if wanted is not None and before is not None and not same_value(wanted, after):
            names.append(name)
    return names


def needed(facts: Facts) -> str | None:
    names = _overruled(facts, facts.trace) if facts.arch.is_sm12x else []
    return f"SGLang overrules what the launch sets: {', '.join(names)}" if names else None


def verify(facts: Facts, after: Facts) -> tuple[str, ...]:
    if not facts.arch.is_sm12x:
        return ()
    return tuple(f"{name} is still overruled" for name in _overruled(facts, after.trace))


# ------------------------------------------------------------------------ examples

_BEFORE = """\
class ServerArgs:
    def _handle_model(self):
        if model_arch == "DeepseekV4ForCausalLM":
            if is_sm120_supported():
                # SM120 lacks tcgen05/TMEM.
                envs.SGLANG_OPT_USE_TOPK_V2.set(False)
                if not envs.SGLANG_OPT_FUSE_MHC_POST_PRE.is_set():
                    envs.SGLANG_OPT_FUSE_MHC_POST_PRE.set(True)
                envs.SGLANG_FP8_PAGED_MQA_LOGITS_TORCH.set(True)
                # Prefer TileLang over the Torch fallback.
                envs.SGLANG_OPT_USE_TILELANG_INDEXER.set(True)
            elif is_hip():
                envs.SGLANG_FP8_PAGED_MQA_LOGITS_TORCH.set(True)
"""
_AFTER = """\
class ServerArgs:
    def _handle_model(self):
        if model_arch == "DeepseekV4ForCausalLM":
            if is_sm120_supported():
                # SM120 lacks tcgen05/TMEM.
                # dsv4doctor FIX107: what the user set stays.
                if not envs.SGLANG_OPT_USE_TOPK_V2.is_set():
                    envs.SGLANG_OPT_USE_TOPK_V2.set(False)
                if not envs.SGLANG_OPT_FUSE_MHC_POST_PRE.is_set():
                    envs.SGLANG_OPT_FUSE_MHC_POST_PRE.set(True)
                if not envs.SGLANG_FP8_PAGED_MQA_LOGITS_TORCH.is_set():
                    envs.SGLANG_FP8_PAGED_MQA_LOGITS_TORCH.set(True)
                # Prefer TileLang over the Torch fallback.
                if not envs.SGLANG_OPT_USE_TILELANG_INDEXER.is_set():
                    envs.SGLANG_OPT_USE_TILELANG_INDEXER.set(True)
            elif is_hip():
                envs.SGLANG_FP8_PAGED_MQA_LOGITS_TORCH.set(True)
"""
_UPSTREAM = """\
def resolve(server_args):
    if get_platform().is_sm120:
        envs.SGLANG_OPT_USE_TOPK_V2.set(False)
        if not envs.SGLANG_FP8_PAGED_MQA_LOGITS_TORCH.is_set():
            envs.SGLANG_FP8_PAGED_MQA_LOGITS_TORCH.set(True)
"""

EXAMPLES = (
    Example("set on sm_12x whatever was there", {FILES[0]: _BEFORE}, {FILES[0]: _AFTER}),
    Example("guarded upstream", {FILES[1]: _UPSTREAM}, None, Present),
    Example(
        "under another condition",
        {FILES[1]: _UPSTREAM.replace("get_platform().is_sm120", "get_platform().is_cuda")},
        None,
        Refused,
    ),
    Example("nowhere", {FILES[0]: "class ServerArgs:\n    pass\n"}, None, Absent),
)

FIX = Fix(
    id=ID,
    title="Variables that the user set stay on sm_12x",
    rules=("DSV401",),
    files=FILES,
    plan=plan,
    needed=needed,
    changes=changes,
    changes_path=lambda path: path.name.startswith(("indexer-", "mhc-", "dense-fp8")),
    verify=verify,
    verified_by="the trace: no variable that the launch sets is set to something else",
    examples=EXAMPLES,
)
