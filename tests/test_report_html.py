"""The HTML report: its structure, and what a real browser makes of it."""

import json
import shutil
import struct
import subprocess
import zlib
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
import reporting

from dsv4doctor.models import Report, Run
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


def _corner(png: Path) -> tuple[int, ...]:
    """The colour of the first pixel: no PNG filter changes it."""
    data, at, packed = png.read_bytes(), 8, b""
    while at < len(data):
        length, kind = struct.unpack(">I4s", data[at : at + 8])
        packed += data[at + 8 : at + 8 + length] if kind == b"IDAT" else b""
        at += 12 + length
    return tuple(zlib.decompress(packed)[1:4])


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


@pytest.mark.chromium
def test_browser_shows_light_and_dark(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(html.render(_RUNS["story"]()), encoding="utf-8")
    corners = []
    for scheme in (1, 0):
        shot = tmp_path / f"{scheme}.png"
        _browse(
            page,
            tmp_path,
            f"--blink-settings=preferredColorScheme={scheme}",
            f"--screenshot={shot}",
        )
        corners.append(_corner(shot))
    assert corners == [(0xF6, 0xF7, 0xF9), (0x0F, 0x13, 0x18)]
