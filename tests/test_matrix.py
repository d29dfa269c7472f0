"""The matrix: cells from recorded real traces, what is recommended of them, and every format."""

import csv
import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from markdown_it import MarkdownIt

from dsv4doctor import jsonio
from dsv4doctor.errors import UndeterminedError, UsageError
from dsv4doctor.evidence.grounds import Grounds
from dsv4doctor.matrix import (
    Cell,
    FlagSet,
    Key,
    Matrix,
    cell,
    flag_sets_to_try,
    left_out,
    recommend,
)
from dsv4doctor.matrix_fix import cautions, patch_for_draft
from dsv4doctor.models import ARCHS, SglangError, SglangTree, StoredFormat, Trace, Verdict
from dsv4doctor.report import matrix as report
from dsv4doctor.report.console import Style
from dsv4doctor.report.matrix import Advice
from dsv4doctor.report.matrix_console import as_console
from dsv4doctor.report.matrix_html import render

_ROOT = Path(__file__).parent
_CHECKPOINT = "DeepSeek-V4-Flash-NVFP4"
_ROWS: list[dict[str, Any]] = json.loads(
    (_ROOT / "data" / "matrix_traces.json").read_text(encoding="utf-8")
)
_R, _S, _F, _U = Verdict.RUNS, Verdict.FALLBACK, Verdict.FAILS, Verdict.UNKNOWN
_PINNED = Grounds(flashinfer="0.7.2")


def _trace(release: str, arch: str, flag_set: str) -> tuple[Trace, dict[str, str]]:
    wanted = (release, arch, flag_set)
    row = next(r for r in _ROWS if (r["release"], r["arch"], r["flag_set"]) == wanted)
    return jsonio.from_plain(row["trace"], Trace, "recorded"), row["texts"]


def _cell(release: str, arch: str, flag_set: str, clamp: bool = True) -> Cell:
    trace, texts = _trace(release, arch, flag_set)
    key = Key(release, ARCHS[arch], _CHECKPOINT, flag_set)
    return cell(key, trace, texts, grounds=_PINNED, has_clamp=clamp)


@pytest.fixture(scope="module")
def matrix() -> Matrix:
    """2 releases x 2 GPUs x 6 flag sets of the hybrid NVFP4 checkpoint."""
    sets = {row["flag_set"]: FlagSet(row["flag_set"], tuple(row["flags"])) for row in _ROWS}
    cells = tuple(_cell(row["release"], row["arch"], row["flag_set"]) for row in _ROWS)
    archs = (ARCHS["sm_100"], ARCHS["sm_120"])
    return Matrix(("0.5.14", "0.5.23"), archs, (_CHECKPOINT,), tuple(sets.values()), cells)


# ------------------------------------------------------------------------------ cells


@pytest.mark.parametrize(
    ("release", "arch", "flag_set", "main", "draft"),
    [
        ("0.5.14", "sm_100", "as given", _R, _R),
        ("0.5.14", "sm_120", "as given", _F, _F),
        ("0.5.23", "sm_120", "flashinfer_cutlass", _R, _F),
        ("0.5.14", "sm_120", "flashinfer_cutlass", _F, _F),
        ("0.5.23", "sm_120", "marlin", _S, _F),
        ("0.5.23", "sm_100", "marlin", _S, _R),
        ("0.5.23", "sm_100", "triton", _F, _R),
        ("0.5.23", "sm_120", "flashinfer_cutlass, no draft", _R, None),
    ],
)
def test_verdicts_of_recorded_launches(
    release: str, arch: str, flag_set: str, main: Verdict, draft: Verdict | None
) -> None:
    found = _cell(release, arch, flag_set)
    assert found.main.verdict is main
    assert (found.draft.verdict if found.draft else None) is draft
    assert found.traced
    assert found.works == all(one in (_R, _S) for one in (main, draft) if one is not None)


def test_the_worse_of_both_is_the_cells() -> None:
    assert _cell("0.5.23", "sm_120", "flashinfer_cutlass").verdict is _F
    assert _cell("0.5.23", "sm_100", "marlin").verdict is _S
    assert _cell("0.5.23", "sm_100", "as given").verdict is _R


def test_a_clamp_that_is_dropped_is_wrong_output_and_only_where_the_model_has_one() -> None:
    lost = _cell("0.5.14", "sm_120", "flashinfer_cutlass, no draft")
    assert lost.verdict is _F
    assert lost.is_determined
    assert lost.main.reason.startswith("wrong output: it runs without the model's SwiGLU clamp")
    assert not lost.works
    assert _cell("0.5.14", "sm_120", "flashinfer_cutlass, no draft", clamp=False).works
    assert _cell("0.5.23", "sm_120", "flashinfer_cutlass, no draft").works


def test_layers_that_were_built_before_the_stop_do_not_stand_for_all() -> None:
    trace, texts = _trace("0.5.23", "sm_100", "as given")

    def main_and_draft(**changes: Any) -> tuple[Verdict, Verdict | None]:
        found = cell(_KEY, replace(trace, **changes), texts, grounds=_PINNED, has_clamp=True)
        return found.main.verdict, found.draft.verdict if found.draft else None

    assert main_and_draft() == (_R, _R)
    assert main_and_draft(errors=(SglangError("main", "ValueError", "no", None),)) == (_F, _R)
    assert main_and_draft(unresolved=("main: KeyError: 'x'",)) == (_U, _R)
    assert main_and_draft(unresolved=("draft: KeyError: 'x'",)) == (_R, _U)


def test_sglangs_refusal_names_its_line() -> None:
    found = _cell("0.5.23", "sm_100", "triton")
    assert "SGLang raises NotImplementedError at sglang/srt/layers/" in found.main.reason
    assert found.main.layers == "model.layers.0-1.mlp.experts"


_KEY = Key("0.5.23", ARCHS["sm_120"], _CHECKPOINT, "as given")


def test_what_could_not_be_traced_is_unknown_and_a_refused_flag_fails() -> None:
    gone = cell(_KEY, UndeterminedError("killed"), {}, grounds=None, has_clamp=True)
    assert (gone.verdict, gone.traced, gone.works) == (_U, False, False)
    assert gone.main.reason == "killed"
    refused = cell(_KEY, UsageError("no such flag"), {}, grounds=None, has_clamp=True)
    assert (refused.verdict, refused.traced) == (_F, True)


def test_a_launch_that_stops_before_its_layers() -> None:
    trace, _ = _trace("0.5.23", "sm_100", "as given")
    early = SglangError("arguments", "ValueError", "no", None)
    bare = replace(trace, layers=())
    stopped = cell(_KEY, replace(bare, errors=(early,)), {}, grounds=None, has_clamp=True)
    assert stopped.main.reason == "SGLang raises ValueError: no"
    assert stopped.draft is not None
    assert stopped.draft.verdict is _F
    short = cell(
        _KEY, replace(bare, unresolved=("main: KeyError",)), {}, grounds=None, has_clamp=True
    )
    assert (short.verdict, short.main.reason) == (_U, "the trace stopped short: main: KeyError")
    assert not short.is_determined
    doubted = replace(trace, unresolved=("arguments: a check calls a stand-in",))
    unsure = cell(_KEY, doubted, {}, grounds=_PINNED, has_clamp=True)
    assert unsure.main.verdict is _U
    assert not unsure.is_determined
    empty = cell(_KEY, bare, {}, grounds=None, has_clamp=True)
    assert (empty.verdict, empty.works) == (_U, False)
    # The main model is there; only the draft's building fails.
    draft_error = replace(early, phase="draft")
    main_only = replace(trace, layers=trace.layers[:2], errors=(draft_error,))
    half = cell(_KEY, main_only, {}, grounds=_PINNED, has_clamp=True)
    assert half.main.verdict is _R
    assert half.draft is not None
    assert half.draft.verdict is _F


# ------------------------------------------------------------------------------ what to choose

_NEWEST = ("0.5.23", "0.5.14")


def test_on_sm_100_the_newest_with_a_draft_comes_first(matrix: Matrix) -> None:
    best, second, *rest = recommend(matrix, ARCHS["sm_100"], _CHECKPOINT, _NEWEST)
    assert (best.cell.key.release, best.cell.key.flag_set) == ("0.5.23", "as given")
    assert second.cell.key.flag_set == "flashinfer_cutlass"
    assert best.why.count("tier 1") == 2
    drafts = [one.cell.draft is not None for one in (best, second, *rest)]
    assert drafts == sorted(drafts, reverse=True)
    slow = [one.cell.verdict is _S for one in rest if one.cell.draft is not None]
    assert slow == sorted(slow)


def test_on_sm_120_no_launch_of_the_hybrid_keeps_its_draft(matrix: Matrix) -> None:
    choices = recommend(matrix, ARCHS["sm_120"], _CHECKPOINT, _NEWEST)
    assert [(one.cell.key.release, one.cell.key.flag_set) for one in choices] == [
        ("0.5.23", "flashinfer_cutlass, no draft"),
        ("0.5.23", "marlin, no draft"),
        ("0.5.14", "marlin, no draft"),
    ]
    advice = Advice(ARCHS["sm_120"], _CHECKPOINT, "org/model", choices, {"A": "x y"})
    assert advice.command(choices[0]) == (
        "A='x y' python -m sglang.launch_server --model-path org/model --tp 4 "
        "--moe-runner-backend flashinfer_cutlass"
    )
    assert "Without speculative decoding" in (advice.caveat or "")
    assert Advice(ARCHS["sm_120"], _CHECKPOINT, "m", ()).caveat == (
        "Nothing in this matrix runs main and draft on it."
    )


@pytest.mark.wheels
def test_the_patch_for_a_draft_that_nothing_runs(
    matrix: Matrix, sglang_tree: Callable[[str], SglangTree]
) -> None:
    arch, trees = ARCHS["sm_120"], {name: sglang_tree(name) for name in _NEWEST}
    found, _ = patch_for_draft(matrix, arch, _CHECKPOINT, _NEWEST, trees)
    assert found is not None
    assert (found.cell.key.release, found.fixes) == ("0.5.23", ("FIX101",))
    assert found.cell.key.flag_set == "flashinfer_cutlass"
    assert found.command("m", {"A": "x y"}).startswith(
        "dsv4doctor fix --only FIX101 m --arch sm_120 --sglang 0.5.23 --env 'A=x y' -- --tp 4"
    )
    old, _ = patch_for_draft(matrix, arch, _CHECKPOINT, _NEWEST, {"0.5.14": trees["0.5.14"]})
    assert old is not None
    # CUTLASS drops the clamp there: never without the fix that passes it on.
    assert (old.cell.key.flag_set, old.fixes) == ("flashinfer_cutlass", ("FIX101", "FIX103"))
    nothing = (None, ())
    assert patch_for_draft(matrix, ARCHS["sm_100"], _CHECKPOINT, _NEWEST, trees) == nothing
    choices = recommend(matrix, arch, _CHECKPOINT, _NEWEST)
    [caution] = cautions(choices, trees)
    assert "w1_weight_scale_2 must match w3_weight_scale_2" in caution
    advice = Advice(arch, _CHECKPOINT, "m", choices, cautions=(caution,), patch=found)
    assert "FIX101" in (advice.caveat or "")
    assert advice.patch_command is not None
    for text in (as_console(matrix, (advice,), Style(60)), render(matrix, (advice,))):
        assert advice.patch_command in text


def test_nothing_unknown_and_nothing_wrong_is_recommended(matrix: Matrix) -> None:
    for arch in matrix.archs:
        for choice in recommend(matrix, arch, _CHECKPOINT, _NEWEST):
            assert {part.verdict for part in choice.cell.parts} <= {_R, _S}
            assert "wrong output" not in choice.cell.main.reason
    unknown = replace(matrix, cells=tuple(
        cell(one.key, UndeterminedError("x"), {}, grounds=None, has_clamp=True)
        for one in matrix.cells
    ))  # fmt: skip
    assert recommend(unknown, ARCHS["sm_100"], _CHECKPOINT, _NEWEST) == ()


def test_a_hot_path_that_fails_is_named_and_its_launch_not_recommended(matrix: Matrix) -> None:
    arch = ARCHS["sm_120"]
    best, *rest = recommend(matrix, arch, _CHECKPOINT, _NEWEST)
    broken = replace(best.cell, path_problem="main indexer-decode: no kernel")
    cells = tuple(broken if one is best.cell else one for one in matrix.cells)
    without = replace(matrix, cells=cells)
    assert recommend(without, arch, _CHECKPOINT, _NEWEST) == tuple(rest)
    named = left_out(without, arch, _CHECKPOINT)
    assert named == ("SGLang 0.5.23 (main indexer-decode: no kernel)",)
    caveat = Advice(arch, _CHECKPOINT, "m", tuple(rest), left_out=named).caveat or ""
    assert "Without speculative decoding" in caveat
    assert named[0] in caveat


def test_what_is_tried_for_a_stored_format() -> None:
    flags = ("--tp", "4", "--speculative-algorithm", "EAGLE")
    tried = {
        one.name: one.flags
        for one in flag_sets_to_try(flags, [StoredFormat.NVFP4, None, StoredFormat.MXFP4])
    }
    assert tried["as given"] == flags
    assert tried["marlin"] == (*flags, "--moe-runner-backend", "marlin")
    assert tried["as given, no draft"] == ("--tp", "4")
    assert "flashinfer_cutlass, draft marlin" in tried
    assert len(set(tried.values())) == len(tried)
    assert [one.name for one in flag_sets_to_try(("--tp", "4"), [])] == ["as given"]
    own = flag_sets_to_try(("--moe-runner-backend", "marlin"), [StoredFormat.MXFP4])
    assert [one.name for one in own] == ["as given", "flashinfer_mxfp4", "triton"]


# ------------------------------------------------------------------------------ formats


def _advice(matrix: Matrix) -> tuple[Advice, ...]:
    return tuple(
        Advice(arch, _CHECKPOINT, "model", recommend(matrix, arch, _CHECKPOINT, _NEWEST))
        for arch in matrix.archs
    )


_HOSTILE = "a|b`c` <script>*x*</script>\x1b[31m\nnext"


def _hostile(matrix: Matrix) -> Matrix:
    first = matrix.cells[0]
    bad = replace(first, main=replace(first.main, reason=_HOSTILE, verdict=_U))
    return replace(matrix, cells=(bad, *matrix.cells[1:]), notes=(_HOSTILE,))


def test_json_fits_its_schema(matrix: Matrix) -> None:
    schema = json.loads((_ROOT.parent / "docs" / "matrix.schema.json").read_text("utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    for one in (matrix, _hostile(matrix), replace(matrix, cells=(), interrupted=True)):
        plain = json.loads(report.as_json(one, _advice(one)))
        jsonschema.validate(plain, schema)
    plain = json.loads(report.as_json(matrix, _advice(matrix)))
    assert len(plain["cells"]) == 24
    broken = {**plain, "extra": 1}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, schema)


def test_csv_has_a_line_a_model(matrix: Matrix) -> None:
    rows = list(csv.DictReader(io.StringIO(report.as_csv(_hostile(matrix)))))
    assert len(rows) == sum(len(one.parts) for one in matrix.cells)
    assert rows[0]["reason"] == _HOSTILE
    assert {row["role"] for row in rows} == {"main", "draft"}
    first = matrix.cells[0]
    formula = replace(first, main=replace(first.main, reason="=cmd()"))
    assert "'=cmd()" in report.as_csv(replace(matrix, cells=(formula,)))


def test_markdown_is_a_table_that_nothing_breaks(matrix: Matrix) -> None:
    text = report.as_markdown(_hostile(matrix), _advice(matrix))
    page = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    assert page.count("<table>") == len(matrix.flag_sets)
    assert page.count("<tr>") == len(matrix.flag_sets) * (1 + len(matrix.releases))
    assert "<script>" not in page
    assert "<em>x</em>" not in page
    assert "What to use on sm_120" in page


def test_console_shows_verdicts_reasons_and_the_command(matrix: Matrix) -> None:
    text = as_console(_hostile(matrix), _advice(matrix), Style(120))
    assert re.search(r"0\.5\.23 +marlin +fallback / runs +fallback / fails", text)
    assert "What to use on sm_120" in text
    assert "--moe-runner-backend flashinfer_cutlass" in text
    assert "\x1b" not in text
    narrow = as_console(matrix, _advice(matrix), Style(60)).splitlines()
    launches = [line for line in narrow if "launch_server" in line]
    head = narrow[: narrow.index("")]
    assert head[0].startswith("every set")
    assert " ".join(" ".join(head).split()).count("--tp 4") == 1
    assert " ".join(head).count("--speculative-algorithm") == 1
    assert re.search(r"^marlin +speculation,", "\n".join(head), re.M)
    reasons = [line for line in narrow if re.match(" *fails +\\(", line)]
    after = narrow[narrow.index(reasons[0]) + 1]
    assert after.startswith(" " * 11)  # under the reason, not under the verdict
    assert launches  # each is one line, to be pasted
    assert all("--model-path" in line and "--tp" in line for line in launches)
    assert text.count("exists for sm_100 and sm_103 only") == 1  # not once a cell
    assert "table of known kernels" not in text
    long = as_console(matrix, (), Style(120, verbose=True))
    assert "table of known kernels" in long
    part = replace(matrix, cells=matrix.cells[:3], interrupted=True)
    said = as_console(part, (), Style(120))
    assert "Interrupted" in said
    assert re.search(r"0\.5\.23 +marlin +- +-", said)
    assert report.counted(part).endswith("21 not reached")


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_html_is_self_contained_and_every_cell_opens(matrix: Matrix) -> None:
    text = render(_hostile(matrix), _advice(matrix))
    page = _Page()
    page.feed(text)
    names = [tag for tag, _ in page.tags]
    assert names.count("details") == names.count("summary") == len(matrix.cells)
    assert not {"script", "link", "img", "iframe"} & set(names)
    assert not any("href" in attrs or "src" in attrs for _, attrs in page.tags)
    tones = [attrs["class"] for tag, attrs in page.tags if tag == "details"]
    assert set(tones) == {"runs", "fallback", "fails", "unknown"}
    assert "prefers-color-scheme: dark" in text
    assert "default-src 'none'" in text
    part = render(replace(matrix, cells=matrix.cells[:3], interrupted=True), ())
    assert part.count("not reached") == 21 + 1
