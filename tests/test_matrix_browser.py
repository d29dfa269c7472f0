"""The matrix page in a real browser: cells open, colours by verdict, nothing runs off the side."""

import json
import subprocess
from dataclasses import replace
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

from dsv4doctor.matrix import Cell, FlagSet, Key, Matrix, Part
from dsv4doctor.models import ARCHS, Verdict
from dsv4doctor.report.matrix_html import render

_MEASURE = """
const page = document.getElementById('frame').contentDocument;
const cells = [...page.querySelectorAll('.heat details')];
const colour = one => getComputedStyle(one).backgroundColor;
const closed = cells.map(one => one.getBoundingClientRect().height);
const tones = Object.fromEntries(cells.map(one => [one.className, colour(one)]));
cells[0].querySelector('summary').click();
document.getElementById('measured').textContent = JSON.stringify({
  tones, page: colour(page.body), text: cells[0].innerText, open: cells[0].open,
  grown: cells[0].getBoundingClientRect().height - closed[0],
  overflow: page.documentElement.scrollWidth - page.documentElement.clientWidth,
});
"""


def _matrix() -> Matrix:
    """Every verdict, on five GPUs, with words that are too long for a cell."""
    archs = tuple(ARCHS.values())
    verdicts = [*Verdict, Verdict.RUNS]
    part = Part(Verdict.RUNS, f"because of {'x' * 200}", "model.layers.0-42.mlp.experts")
    cells = tuple(
        Cell(Key("0.5.23", arch, "model", "as given"), replace(part, verdict=verdict), part, True)
        for arch, verdict in zip(archs, verdicts, strict=True)
    )
    flags = FlagSet("as given", ("--served-model-name", "y" * 300))
    return Matrix(("0.5.23",), archs, ("model",), (flags,), cells)


def _measured(folder: Path, width: int, scheme: int) -> dict[str, Any]:
    quoted = escape(render(_matrix(), ()), quote=True)
    wrapper = folder / "wrapper.html"
    wrapper.write_text(
        '<!DOCTYPE html><meta charset="utf-8"><pre id="measured"></pre>'
        f'<iframe id="frame" style="width:{width}px;height:900px;border:0" srcdoc="{quoted}">'
        f"</iframe><script>onload = () => {{{_MEASURE}}}</script>",
        encoding="utf-8",
    )
    done = subprocess.run(
        [
            *("chromium", "--headless=new", "--no-sandbox", "--disable-gpu"),
            f"--user-data-dir={folder / 'profile'}",
            f"--blink-settings=preferredColorScheme={scheme}",
            *("--window-size=1600,1000", "--dump-dom", wrapper.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    text = done.stdout.partition('<pre id="measured">')[2].partition("</pre>")[0]
    found: dict[str, Any] = json.loads(unescape(text))
    return found


@pytest.mark.chromium
@pytest.mark.parametrize(
    ("width", "scheme", "page", "runs"),
    [
        (1100, 1, "rgb(246, 247, 249)", "rgb(26, 127, 75)"),
        (400, 0, "rgb(15, 19, 24)", "rgb(63, 185, 122)"),
    ],
)
def test_cells_open_in_light_and_dark(
    width: int, scheme: int, page: str, runs: str, tmp_path: Path
) -> None:
    found = _measured(tmp_path, width, scheme)
    assert found["page"] == page
    assert found["tones"]["runs"] == runs
    assert len(set(found["tones"].values())) == 4
    assert found["open"]
    assert found["grown"] > 50
    assert "because of" in found["text"]
    assert found["overflow"] == 0
