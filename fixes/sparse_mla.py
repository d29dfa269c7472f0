"""FIX105: sparse-MLA decode on our kernel where sm_12x has the one that works head by head.

Looks for: in `flash_mla_with_kvcache_sm120`, the call of `flash_mla_sparse_decode_triton`, which
starts one block for every (row, head) and so reads the KV cache once a head.  Writes: our kernel
in front of it, with the same keywords; without a stamp the call stays.  FlashInfer's path, the
default from 0.5.16 on, is left alone.
"""

from __future__ import annotations

import libcst as cst
import libcst.matchers as m

from dsv4doctor.fixes import edit
from dsv4doctor.fixes import verified_kernels as shared
from dsv4doctor.fixes.fix import Absent, Choice, Example, Fix, Outcome, Present, Refused, Sources
from dsv4doctor.models import Facts
from dsv4doctor.rules.common import in_effect
from dsv4doctor.rules.rule import NotChecked

ID = "FIX105"
FILES = (
    "sglang/kernels/ops/attention/flash_mla_sm120.py",
    "sglang/srt/layers/attention/flash_mla_sm120.py",
)
_PER_HEAD = "flash_mla_sparse_decode_triton"
_PATHS = ("sparse-mla-decode", "sparse-mla-prefill")
_KERNEL = "flash_mla_sm120_triton"

_CODE = (
    f"# dsv4doctor {ID}: one read of the KV cache for all heads.\n"
    + shared.ours(ID, "ours", "sparse_mla_decode", "flash_mla_with_kvcache_sm120")
    + "if ours is not None:\n    return ours(**kwargs)\n\n"
)


def _in_front(piece: edit.Piece, node: cst.CSTNode) -> str:
    return _CODE + piece.source(node) + "\n"


_SITE = shared.Site(
    files=FILES,
    function="flash_mla_with_kvcache_sm120",
    word=_PER_HEAD,
    matcher=m.SimpleStatementLine(body=[m.Assign(value=m.Call(func=m.Name(_PER_HEAD)))]),
    code=_in_front,
    expected=f"def flash_mla_with_kvcache_sm120(**kwargs):\n    out, lse = {_PER_HEAD}(...)",
    reason="the kernel that works head by head is called another way",
)


_SUMMARY = "Sparse MLA that would go to SGLang's Triton kernel goes to dsv4doctor's."


def plan(sources: Sources, choice: Choice) -> Outcome:
    return shared.plan(sources, choice, ID, (_SITE,), _SUMMARY, "sparse_mla_decode")


def needed(facts: Facts) -> str | None:
    reason = "sparse MLA goes to the kernel that reads the KV cache once a head"
    if not facts.arch.is_sm12x:
        return None
    if facts.trace is not None and facts.trace.paths:
        return reason if shared.on_path(facts.trace, _PATHS, _KERNEL) else None
    if facts.features is None or facts.features.sparse_mla_file is None:
        return None
    name = "SGLANG_SM120_FLASHMLA_BACKEND"
    if name not in facts.features.environment_defaults:
        return reason  # older than FlashInfer's path
    try:
        return reason if in_effect(facts, name) == "triton" else None
    except NotChecked:
        return None


def verify(facts: Facts, after: Facts) -> tuple[str, ...]:
    return shared.still_on(after.trace, _PATHS, _KERNEL) if facts.arch.is_sm12x else ()


_BEFORE = """\
def flash_mla_with_kvcache_sm120(**kwargs):
    if _sm120_default_backend == "triton":
        out, lse = flash_mla_sparse_decode_triton(
            q,
            k_cache,
        )
        return (out, lse)
    return _sm120_sparse_decode_fwd(q, k_cache)
"""
_AFTER = """\
def flash_mla_with_kvcache_sm120(**kwargs):
    if _sm120_default_backend == "triton":
        # dsv4doctor FIX105: one read of the KV cache for all heads.
        try:
            from dsv4doctor.kernels.adapters.verified import (
                verified,
            )
        except ImportError as error:
            raise RuntimeError(
                f"SGLang is patched by dsv4doctor (FIX105), not importable here ({error}): "
                "run `pip install dsv4doctor`, or with it `dsv4doctor fix --revert`"
            ) from error

        ours = verified("sparse_mla_decode", "flash_mla_with_kvcache_sm120")
        if ours is not None:
            return ours(**kwargs)

        out, lse = flash_mla_sparse_decode_triton(
            q,
            k_cache,
        )
        return (out, lse)
    return _sm120_sparse_decode_fwd(q, k_cache)
"""

FIX = Fix(
    id=ID,
    title="Sparse MLA with one read of the KV cache for all heads",
    rules=("DSV203",),
    files=FILES,
    plan=plan,
    needed=needed,
    changes=shared.no_layer,
    changes_path=lambda path: shared.reaches(path, _PATHS, _KERNEL),
    verify=verify,
    verified_by="the trace of the hot paths: sparse MLA reaches dsv4doctor's kernel",
    examples=(
        Example("the kernel that works head by head", {FILES[0]: _BEFORE}, {FILES[0]: _AFTER}),
        Example("patched already", {FILES[1]: _AFTER}, None, Present),
        Example(
            "called another way",
            {FILES[1]: _BEFORE.replace("out, lse = flash_mla_sparse", "return flash_mla_sparse")},
            None,
            Refused,
        ),
        Example("no such function", {FILES[1]: "x = 1\n"}, None, Absent),
    ),
)
