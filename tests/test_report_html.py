"""The HTML report: its structure, and what a real browser makes of it."""

import json
import shutil
import struct
import subprocess
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from html import escape, unescape
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import reporting

from dsv4doctor.models import Report, Run, Verdict
from dsv4doctor.report import html

_VOID = {"meta", "br"}
_ALLOWED = {
    *("html", "head", "meta", "title", "style", "body", "section", "nav", "article", "header"),
    *("footer", "h1", "h2", "h3", "h4", "p", "a", "b", "br", "code", "pre", "span", "div"),
    *("ul", "ol", "li", "dl", "dt", "dd", "details", "summary", "table", "tr", "th", "td"),
}
_ATTRIBUTES = {
    *("class", "title", "id", "href", "colspan", "open", "lang", "charset", "name", "content"),
    "http-equiv",
}


class _Page(HTMLParser):
    """Fails on what is not balanced; keeps the text and the attributes."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.style = ""
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "style":
            self.style += data
        else:
            self.texts.append(data)

    def values(self, attribute: str) -> list[str]:
        return [value for name, value in self.attributes if name == attribute]


def _page(*reports: Report) -> _Page:
    return _Page(html.render(Run(reports)))


_RUNS: dict[str, Callable[[], Run]] = {
    "story": lambda: Run((reporting.report(reporting.story()),)),
    "clean": lambda: Run((reporting.clean(),)),
    "hostile": lambda: Run((reporting.hostile(),)),
    "several": reporting.several,
    "pair": reporting.pair,
}


@pytest.mark.parametrize("name", _RUNS)
def test_page_is_balanced_and_stands_alone(name: str) -> None:
    page = _Page(html.render(_RUNS[name]()))
    assert set(page.tags) <= _ALLOWED
    assert {attribute for attribute, _ in page.attributes} <= _ATTRIBUTES
    anchors = {f"#{name}" for name in page.values("id")}
    assert set(page.values("href")) <= anchors
    assert "url(" not in page.style
    assert "@import" not in page.style
    assert len(page.values("id")) == len(set(page.values("id")))


def test_hostile_text_is_shown_as_it_is() -> None:
    page = _page(reporting.hostile())
    shown = "".join(page.texts)
    harmless = reporting.HOSTILE.split("`")[0]  # up to where our own sentences have code
    assert harmless.startswith("<script>alert(1)</script>")
    assert shown.count(harmless) > 10
    assert not set("\x00\x1b\ufffe") & set(shown)
    assert any(harmless in title for title in page.values("title"))


def test_every_layer_is_in_the_strip_by_its_verdict() -> None:
    page = _page(reporting.report(reporting.story()))
    assert [value for value in page.values("class") if value in ("runs", "fails")] == [
        *["fails"] * 4,  # three main layers and the draft's
        *("runs", "fails"),  # the legend
    ]
    assert len(page.values("title")) == 4


def test_what_a_reader_needs_is_there() -> None:
    shown = " ".join(" ".join(_page(reporting.report(reporting.story())).texts).split())
    for part in (
        "return Mxfp4FlashinferTrtllmMoEMethod(Fp8MoEMethod(self), prefix=prefix)",
        "self.is_fp4_experts = True",
        "Draft model: how its routed experts are decided",
        "What to do",
        "deploy/serve it.sh:12",
    ):
        assert part in shown


def test_both_colour_schemes_define_the_same_colours() -> None:
    style = _page(reporting.clean()).style
    light, dark = (part.split("}")[0] for part in style.split(":root {")[1:3])
    names = [
        {line.split(":")[0].strip() for line in part.split(";") if "--" in line}
        for part in (light, dark)
    ]
    assert names[0] == names[1]
    assert "prefers-color-scheme: dark" in style


# ------------------------------------------------------------------------------ a real browser


def _browse(page: Path, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    quiet = (
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        *("--hide-scrollbars", "--enable-logging=stderr", "--window-size=1200,900"),
    )
    browser = shutil.which("chromium")
    assert browser is not None
    return subprocess.run(
        [browser, *quiet, f"--user-data-dir={folder / 'profile'}", *options, page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )


def _requests(page: Path, folder: Path) -> tuple[set[str], subprocess.CompletedProcess[str]]:
    """What the page itself asked for; the browser's own traffic has no page behind it."""
    log = folder / "net.json"
    done = _browse(page, folder, f"--log-net-log={log}", "--dump-dom")
    events = json.loads(log.read_text(encoding="utf-8"))["events"]
    details = [event.get("params", {}) for event in events]
    asked = {
        one["url"]
        for one in details
        if "url" in one and one.get("initiator", "not an origin") != "not an origin"
    }
    return asked, done


@pytest.mark.chromium
@pytest.mark.parametrize("name", ["hostile", "several"])
def test_browser_runs_nothing_and_asks_for_nothing(name: str, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(html.render(_RUNS[name]()), encoding="utf-8")
    asked, done = _requests(page, tmp_path)
    assert asked == set()
    assert "CONSOLE" not in done.stderr
    assert "<script" not in done.stdout


@pytest.mark.chromium
def test_a_request_and_a_console_message_would_be_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("<img src='http://localhost:9/x.png'><script>console.error('here')</script>")
    asked, done = _requests(page, tmp_path)
    assert asked == {"http://localhost:9/x.png"}
    assert "CONSOLE" in done.stderr


# ------------------------------------------------------------------------------ how it looks

_LIGHT = {"runs": (26, 127, 75), "fallback": (154, 106, 0), "fails": (198, 47, 47)}
_DARK = {"runs": (63, 185, 122), "fallback": (224, 171, 58), "fails": (244, 112, 112)}
_SCHEMES = {
    "light": (1, (246, 247, 249), {**_LIGHT, "unknown": (106, 111, 120)}),
    "dark": (0, (15, 19, 24), {**_DARK, "unknown": (143, 153, 165)}),
}
_SHAPES = {"runs": "✓", "fallback": "~", "fails": "✕", "unknown": "?"}


def _every_verdict() -> Run:
    """The story on 44 layers of all verdicts, a command to copy, and a long word."""
    sample = reporting.story()
    assert sample.trace is not None
    first = sample.trace.layers[0]
    verdicts = list(Verdict)
    layers = tuple(
        replace(first, name=f"model.layers.{index}.mlp.experts", verdict=verdicts[index % 4])
        for index in range(43)
    )
    trace = replace(sample.trace, layers=(*layers, sample.trace.layers[-1]))
    launch = sample.snapshot.launch
    assert launch is not None
    launch = replace(launch, flags=(*launch.flags, "--served-model-name", "x" * 300))
    snapshot = replace(sample.snapshot, launch=launch)
    return Run((reporting.report(replace(sample, trace=trace, snapshot=snapshot)),))


def _measured(run: Run, folder: Path, width: int, scheme: int) -> dict[str, Any]:
    """What the browser makes of the report in a frame of `width` pixels."""
    quoted = escape(html.render(run), quote=True)
    script = Path(__file__).with_name("measure.js").read_text(encoding="utf-8")
    wrapper = folder / "wrapper.html"
    wrapper.write_text(
        f'<!DOCTYPE html><meta charset="utf-8"><pre id="measured"></pre>'
        f'<iframe id="frame" style="width:{width}px;height:900px;border:0" srcdoc="{quoted}">'
        f"</iframe><script>onload = () => {{{script}}}</script>",
        encoding="utf-8",
    )
    setting = f"--blink-settings=preferredColorScheme={scheme}"
    done = _browse(wrapper, folder, setting, "--dump-dom", "--window-size=1600,1000")
    text = done.stdout.partition('<pre id="measured">')[2].partition("</pre>")[0]
    found: dict[str, Any] = json.loads(unescape(text))
    assert found["width"] == width
    return found


def _apart(one: dict[str, float], other: dict[str, float]) -> bool:
    return (
        one["right"] <= other["left"] + 0.5
        or other["right"] <= one["left"] + 0.5
        or one["bottom"] <= other["top"] + 0.5
        or other["bottom"] <= one["top"] + 0.5
    )


@pytest.mark.chromium
@pytest.mark.parametrize("scheme", _SCHEMES)
@pytest.mark.parametrize("width", [400, 1280])
def test_browser_lays_it_out(scheme: str, width: int, tmp_path: Path) -> None:
    number, background, colours = _SCHEMES[scheme]
    found = _measured(_every_verdict(), tmp_path, width, number)
    assert tuple(found["page"]) == background
    assert found["scrolls"] <= 0
    assert max(found["hidden"]) <= 0
    assert len(found["cells"]) == 44
    for cell in found["cells"]:
        assert tuple(cell["colour"]) == colours[cell["verdict"]]
        assert cell["shape"] == _SHAPES[cell["verdict"]]
    assert {cell["verdict"] for cell in found["cells"]} == set(colours)
    for name, parts in found["parts"].items():
        assert parts, name
        for box in parts:
            assert box["right"] - box["left"] > 20, (name, box)
            assert box["bottom"] - box["top"] > 10, (name, box)
            assert box["left"] >= 0, (name, box)
            assert box["right"] <= width, (name, box)
    for boxes in (found["blocks"], found["strip"], found["steps"]):
        assert all(_apart(one, other) for one, other in combinations(boxes, 2))
    dim = [one for one in found["contrasts"] if one["ratio"] < 4.5 or one["size"] < 12]
    assert dim == []


@pytest.mark.chromium
def test_what_is_ugly_would_be_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoiled = (
        ".soft { color: #bbb !important } h1 { width: 3000px } "
        ".strip span { margin-right: -30px } .finding { margin-top: -80px }"
    )
    monkeypatch.setattr(html, "STYLE", html.STYLE + spoiled)
    found = _measured(_every_verdict(), tmp_path, 1280, 1)
    assert found["scrolls"] > 1000
    assert any(one["ratio"] < 2 for one in found["contrasts"])
    for name in ("strip", "blocks"):
        assert not all(_apart(one, other) for one, other in combinations(found[name], 2))


@pytest.mark.chromium
def test_browser_paints_the_strip(tmp_path: Path) -> None:
    """The pixels themselves: every verdict's colour is on the picture, in both schemes."""
    page = tmp_path / "report.html"
    page.write_text(html.render(_every_verdict()), encoding="utf-8")
    for name, (number, background, colours) in _SCHEMES.items():
        shot = tmp_path / f"{name}.png"
        setting = f"--blink-settings=preferredColorScheme={number}"
        _browse(page, tmp_path, setting, f"--screenshot={shot}", "--window-size=1280,1200")
        counts = _pixels(shot)
        assert counts[background] > 10_000
        for colour in colours.values():
            assert counts[colour] > 2000, (name, colour)


def _pixels(png: Path) -> Counter[tuple[int, ...]]:
    """How often each colour is on an 8-bit RGB or RGBA picture."""
    data, at, packed = png.read_bytes(), 8, b""
    width, height, depth, kind = struct.unpack(">IIBB", data[16:26])
    assert depth == 8
    while at < len(data):
        length, name = struct.unpack(">I4s", data[at : at + 8])
        packed += data[at + 8 : at + 8 + length] if name == b"IDAT" else b""
        at += 12 + length
    size = {2: 3, 6: 4}[kind]
    raw, stride = zlib.decompress(packed), width * size
    counts: Counter[tuple[int, ...]] = Counter()
    before = bytearray(stride)
    for row in range(height):
        start = row * (stride + 1)
        line = _unfiltered(raw[start], bytearray(raw[start + 1 : start + 1 + stride]), before, size)
        counts.update(zip(line[0::size], line[1::size], line[2::size], strict=True))
        before = line
    return counts


def _unfiltered(kind: int, line: bytearray, above: bytearray, size: int) -> bytearray:
    """A row of a PNG: each byte is stored as the difference to what its neighbours foretell."""
    for index in range(len(line) if kind else 0):
        left = line[index - size] if index >= size else 0
        up, corner = above[index], above[index - size] if index >= size else 0
        guess = (left, up, (left + up) // 2, 0)[kind - 1]
        if kind == 4:
            guess = min((left, up, corner), key=lambda one: abs(left + up - corner - one))
        line[index] = (line[index] + guess) & 0xFF
    return line
