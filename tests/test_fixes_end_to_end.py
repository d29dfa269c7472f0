"""A patched tree's own FusedMoE and loader, forward on our kernels through Triton's interpreter."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dsv4doctor.models import SglangTree

PROGRAM = Path(__file__).parent.parent / "docs" / "benchmarks" / "fix_end_to_end.py"


@pytest.mark.wheels
def test_a_patched_layer_computes_what_the_checkpoint_says(
    sglang_tree: Callable[[str], SglangTree], checkpoint: Callable[..., Path]
) -> None:
    model = checkpoint("nvidia__DeepSeek-V4-Flash-NVFP4")
    root = sglang_tree("0.5.14").root
    done = subprocess.run(
        [sys.executable, "-W", "ignore", PROGRAM, "--sglang", root, "--model", model],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout)
    assert result["moe_runner_backend"] == "triton"
    assert [layer["quant_method"] for layer in result["layers"]] == [
        "Dsv4DoctorModelOptNvFp4MoEMethod",
        "Dsv4DoctorMxfp4MoEMethod",
    ]
    for layer in result["layers"]:
        assert 0 < layer["relative_error"] <= layer["bar"]
