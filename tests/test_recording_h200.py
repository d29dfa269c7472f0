"""What real servers on an H200 recorded, against what was predicted of them beforehand.

Holds `diff` to the documents that are kept; nothing is traced anew here.
"""

import json
from pathlib import Path

import pytest

from dsv4doctor.cli import run

FOLDER = Path(__file__).parents[1] / "docs" / "benchmarks" / "h200-2026-11-30-server"


@pytest.mark.parametrize(("name", "comparisons"), [("mxfp4", 33), ("nvfp4-eagle", 44)])
def test_prediction_is_what_a_server_did(
    name: str, comparisons: int, capsys: pytest.CaptureFixture[str]
) -> None:
    documents = [str(FOLDER / f"{name}.{kind}.json") for kind in ("predicted", "recorded")]
    assert run(["diff", *documents, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["standing"] for one in found["differences"]] == ["same"] * comparisons
    assert found["not_recorded"] == []
    kernels = {one["subject"] for one in found["differences"] if one["what"] == "kernel"}
    assert {"main indexer-decode model.layers.2.self_attn"} <= kernels
    assert ("draft sparse-mla-decode model.decoder.self_attn" in kernels) is ("eagle" in name)
