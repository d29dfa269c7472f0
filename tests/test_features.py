"""What SGLang's sources have and lack, in real trees; and advice about flags."""

from collections.abc import Callable
from pathlib import Path

import pytest

from dsv4doctor.facts import callsite
from dsv4doctor.facts.features import read_features
from dsv4doctor.flags import ENGINES, advice, foreign_options, options_of
from dsv4doctor.models import SglangTree


@pytest.mark.wheels
@pytest.mark.parametrize(
    ("version", "scratch", "indexer_bytes", "mxfp8", "engram", "state_by_token"),
    [
        ("0.5.14", None, 4, False, False, True),
        ("0.5.16", None, 2, False, False, False),
        ("0.5.20", 511, 2, False, False, False),
        ("0.5.23", 511, 2, True, True, False),
    ],
)
def test_real_trees(
    sglang_tree: Callable[[str], SglangTree],
    version: str,
    scratch: int | None,
    indexer_bytes: int,
    mxfp8: bool,
    engram: bool,
    state_by_token: bool,
) -> None:
    root = Path(sglang_tree(version).root)
    found = read_features(root)
    assert (found.split_scratch.line if found.split_scratch else None) == scratch
    assert found.torch_indexer_bytes == indexer_bytes
    assert found.torch_indexer_rows == (None if version == "0.5.14" else 1024)
    assert (found.mxfp8_dense is not None, found.engram_over_ranks) == (mxfp8, engram)
    assert found.state_by_token is state_by_token
    assert ("DSPARK" in found.speculative_algorithms) == (version != "0.5.14")
    assert "EAGLE" in found.speculative_algorithms
    assert "NONE" not in found.speculative_algorithms
    assert found.dense_fp8_sm12x == ("triton" if version == "0.5.14" else "cutlass")
    at = found.dense_fp8_sm12x_at
    assert at is not None
    assert at.source == f'backend = "{found.dense_fp8_sm12x}"'
    assert "NVIDIA_H200" in found.tuned_dense_fp8
    assert found.environment_defaults["SGLANG_DSV4_FP4_EXPERTS"] == "True"
    assert found.mooncake_sends_state is True
    activation = found.plain_activation
    assert (activation.line if activation else None) == (475 if version == "0.5.14" else None)
    assert found.marlin_one_scale is not None
    assert found.marlin_one_scale.source == "w13_weight_scale_2 = layer.w13_weight_scale_2[:, 0]"
    for place in (found.torch_indexer, found.probes_experts, found.mxfp8_dense):
        if place is not None:
            line = (root / place.file).read_text(encoding="utf-8").splitlines()[place.line - 1]
            assert line.startswith(f"def {place.function}(")


def test_an_empty_tree_has_nothing(tmp_path: Path) -> None:
    found = read_features(tmp_path)
    assert found.environment_defaults == {}
    assert (found.sparse_mla_file, found.torch_indexer, found.mooncake_sends_state) == (None,) * 3


@pytest.mark.wheels
def test_what_is_advised_exists(sglang_tree: Callable[[str], SglangTree]) -> None:
    srt = Path(sglang_tree("0.5.14").root) / "sglang" / "srt"
    known = options_of([(srt / "server_args.py").read_text(encoding="utf-8")])
    for name, option in ENGINES.items():
        assert name not in known
        if option.sglang is not None:
            assert option.sglang.split()[0] in known
    assert advice(["--tensor-paralel-size", "4"], known) == (
        "--tensor-paralel-size: did you mean --tensor-parallel-size?"
    )


def test_advice() -> None:
    refused = ["--gpu-memory-utilization", "0.9", "--enable-prefix-caching", "--nothing-like-it"]
    assert advice(refused, ["--tp"]) == (
        "--gpu-memory-utilization is vLLM's: SGLang's is --mem-fraction-static; "
        "--enable-prefix-caching is vLLM's: SGLang's radix cache is on by default"
    )
    assert advice(["--nothing-like-it"], ["--tp"]) is None
    flags = ("--tp", "4", "--max-model-len=1", "--max-model-len", "2")
    assert foreign_options(flags) == ("--max-model-len",)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_the_text_of_a_call(tmp_path: Path, end: str) -> None:
    """Columns of Python's parser are in bytes, and a form feed ends no line of its."""
    lines = ["\f", 'x = "ü", kernel("é", (', '    inner("日本", 1)\f,', '), "ö"), "ä"', "y = 1"]
    file = tmp_path / "layer.py"
    file.write_bytes(end.join(lines).encode())
    assert callsite._call_text(file, 2) == 'kernel("é", (\n    inner("日本", 1)\f,\n), "ö")'
    assert callsite._call_text(file, 3) == 'inner("日本", 1)'
    assert callsite._call_text(file, 5) is None
