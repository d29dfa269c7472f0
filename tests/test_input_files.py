"""Files that are read back: what never ends, is nested without end, or is not what we write."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsv4doctor.cli import run
from dsv4doctor.errors import UsageError
from dsv4doctor.models import SglangTree
from dsv4doctor.patching.journal import Store

Said = pytest.CaptureFixture[str]
_DEEP = "[" * 200_000


def _refused(capsys: Said, *arguments: str) -> str:
    assert run(arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    return error


def _status_of_journal(folder: Path, make: Callable[[Path], None]) -> str:
    tree = SglangTree(str(folder / "site"), "0.5.23", "folder")
    store = Store(folder / "state", tree)
    store.folder.mkdir(parents=True)
    make(store.path)
    with pytest.raises(UsageError) as caught:
        store.load()
    return caught.value.message


def _nested(path: Path) -> None:
    path.write_text(_DEEP)


def _large(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 30)


_BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "pipe": (os.mkfifo, "a pipe, socket or device where a file should be"),
    "nested": (_nested, "JSON nested too deeply"),
    "large": (_large, " MiB"),
    "folder": (os.mkdir, "a folder where a file should be"),
    "dangling": (lambda path: path.symlink_to("absent"), "a link to a file that is not there"),
}


@pytest.mark.parametrize("kind", _BAD)
def test_every_file_that_is_read_back_is_a_bounded_file(
    kind: str, tmp_path: Path, capsys: Said
) -> None:
    make, expected = _BAD[kind]
    bad, good = tmp_path / "bad", tmp_path / "good"
    make(bad)
    good.write_text(json.dumps(_report()))
    assert expected in _status_of_journal(tmp_path, make)
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    make(overlay / "overlay.json")
    assert expected in _refused(capsys, "run", "--overlay", str(overlay), "--", "true")
    for pair in ((str(bad), str(good)), (str(good), str(bad))):
        if kind != "folder":  # the parser of the command line says that itself
            assert expected in _refused(capsys, "diff", *pair)
            assert expected in _refused(capsys, "profile", str(good), "--expect", str(bad))


def test_a_journal_that_may_not_be_read_is_no_journal_that_is_not_there(tmp_path: Path) -> None:
    """A name that is too long stands for it: root may read everything."""
    store = Store(tmp_path / ("a" * 300), SglangTree(str(tmp_path), "0.5.23", "folder"))
    with pytest.raises(UsageError, match="File name too long"):
        store.load()
    assert Store(tmp_path / "absent", store.tree).load() is None


# ------------------------------------------------------------------------------ diff


def _report() -> dict[str, Any]:
    layer = {
        **{"role": "main", "name": "model.layers.3.mlp.experts", "quant_method": "Q"},
        **{"runner_backend": "triton", "flags_consulted": ["--a"], "verdict": "works"},
        **{"kernel": {"symbol": "triton:a.b", "call_site": None}, "reason": "it does"},
    }
    path = {
        **{"role": "main", "name": "mhc-pre", "layers": ["model.layers.3"], "choice": "x"},
        **{"kernel": None, "detail": "", "verdict": "unknown", "reason": "not seen"},
    }
    return {
        **{"schema": "dsv4doctor-report/1", "arch": "sm_120", "errors": []},
        **{"sglang": {"root": "r", "version": "0.5.23", "origin": "wheel"}},
        **{"resolved_args": {"tp_size": 4}, "layers": [layer], "paths": [path]},
    }


def _with(value: Any, *place: str | int) -> dict[str, Any]:
    report = _report()
    inner: Any = report
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return report


_PARTS: list[tuple[str | int, ...]] = [
    *(("resolved_args",), ("errors",), ("layers",), ("paths",), ("arch",), ("sglang",)),
    *(("layers", 0, "role"), ("layers", 0, "name"), ("layers", 0, "verdict")),
    *(("layers", 0, "flags_consulted"), ("layers", 0, "kernel", "symbol"), ("paths", 0, "name")),
    *(("paths", 0, "layers"), ("paths", 0, "reason")),
]


@pytest.mark.parametrize("place", _PARTS, ids=lambda place: ".".join(map(str, place)))
@pytest.mark.parametrize("value", [5, ["x"], {"x": 5}, None, [[5]], 0.5, True], ids=json.dumps)
def test_a_report_with_a_part_of_another_kind(
    place: tuple[str | int, ...], value: Any, tmp_path: Path, capsys: Said
) -> None:
    """Refused, or taken where it is harmless; never an error of our own."""
    bad, good = tmp_path / "bad.json", tmp_path / "good.json"
    bad.write_text(json.dumps(_with(value, *place)))
    good.write_text(json.dumps(_report()))
    for pair in ((bad, good), (good, bad)):
        code = run(["diff", *map(str, pair)])
        error = capsys.readouterr().err
        assert "internal error" not in error
        if value is None and place not in [("arch",), ("sglang",)]:
            assert code == 2
            assert "not what dsv4doctor writes" in error


def test_two_reports_that_are_alike(tmp_path: Path, capsys: Said) -> None:
    file = tmp_path / "report.json"
    file.write_text(json.dumps(_report()))
    assert run(["diff", str(file), str(file)]) == 3, capsys.readouterr().err
    assert " 0 drift" in capsys.readouterr().err
