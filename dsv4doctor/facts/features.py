"""What an SGLang tree's sources have and lack, read as text: nothing of the tree is run."""

from __future__ import annotations

import ast
import contextlib
import os
import re
from pathlib import Path

from dsv4doctor.models import Location, TreeFeatures

_SPARSE_MLA = (
    "sglang/kernels/ops/attention/flash_mla_sm120.py",
    "sglang/srt/layers/attention/flash_mla_sm120.py",
)
_INDEXER = "sglang/srt/layers/attention/dsv4/indexer.py"
_GROUPED = "sglang/srt/layers/moe/cutlass_moe.py"
_MODELOPT = "sglang/srt/layers/quantization/modelopt_quant.py"
_GATES_SCALE = re.compile(r"^ +w13_weight_scale_2 = layer\.w13_weight_scale_2\[:, 0\]$", re.M)
_DEFAULT = re.compile(r"^    (SGLANG\w+) = Env\w+\((.*)\)$", re.MULTILINE)

_AUTO_DENSE = re.compile(
    r'if backend == "auto" and [^\n]*sm120[^\n]*:\n(?:\s*#[^\n]*\n)*\s*backend = "(\w+)"'
)
_TABLE = re.compile(r"N=\d+,K=\d+,device_name=([^,]+),dtype=fp8_w8a8,block_shape=.*\.json")

_TABLES = (
    "sglang/srt/layers/quantization/configs",
    "sglang/kernels/ops/quantization/configs",
    "sglang/kernels/ops/gemm/configs",
)


def read_features(root: Path) -> TreeFeatures:
    """The features of the tree whose `sglang/` lies in `root`.  Never raises for a file that is
    missing or unreadable: it has nothing then."""
    sparse_file = next((name for name in _SPARSE_MLA if (root / name).is_file()), None)
    sparse = _text(root, sparse_file) if sparse_file else ""
    indexer = _text(root, _INDEXER)
    torch_indexer, body = _function(_INDEXER, indexer, "fp8_paged_mqa_logits_torch_sm120")
    config = "sglang/srt/configs/deepseek_v4.py"
    probes, _ = _function(config, _text(root, config), "try_detect_fp4_experts")
    modelopt = _text(root, _MODELOPT)
    dense = "sglang/srt/layers/quantization/fp8_utils.py"
    dense_text = _text(root, dense)
    mxfp8, _ = _function(dense, dense_text, "resolve_block_fp8_mxfp8_backend")
    automatic = _AUTO_DENSE.search(dense_text)
    mooncake = _text(root, "sglang/srt/disaggregation/mooncake/conn.py")
    return TreeFeatures(
        environment_defaults=_defaults(_text(root, "sglang/srt/environ.py")),
        sparse_mla_file=sparse_file,
        decode_shape_guard="_decode_dsv4_dispatchable" in sparse,
        prefill_shape_guard="_flashinfer_covers" in sparse,
        split_scratch=_split_scratch(sparse_file, sparse) if sparse_file else None,
        torch_indexer=torch_indexer,
        torch_indexer_bytes=_value_bytes(body),
        torch_indexer_rows=_rows_at_once(body),
        indexer_replaced="dsv4doctor FIX104" in indexer,
        plain_activation=_plain_activation(_text(root, _GROUPED)),
        marlin_one_scale=_last_line(_MODELOPT, modelopt, _GATES_SCALE.search(modelopt)),
        probes_experts=probes,
        mooncake_sends_state="StateType" in mooncake or "state_indices" in mooncake
        if mooncake
        else None,
        mxfp8_dense=mxfp8,
        dense_fp8_sm12x=automatic.group(1) if automatic else None,
        dense_fp8_sm12x_at=_last_line(dense, dense_text, automatic),
        tuned_dense_fp8=_tuned(root),
        state_by_token="c128_state_ratio = self."
        in _text(root, "sglang/srt/model_executor/pool_configurator.py"),
        speculative_algorithms=_algorithms(_text(root, "sglang/srt/speculative/spec_info.py")),
        engram_over_ranks="def shard_range" in _text(root, "sglang/srt/layers/engram.py"),
    )


def _algorithms(text: str) -> tuple[str, ...]:
    members = text.partition("class SpeculativeAlgorithm(")[2].partition("    def ")[0]
    names = re.findall(r"^    ([A-Z][A-Z0-9_]*) = auto\(\)$", members, re.MULTILINE)
    return tuple(name for name in names if name != "NONE")


def _text(root: Path, name: str) -> str:
    try:
        return (root / name).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _defaults(text: str) -> dict[str, str]:
    found = {}
    for name, value in _DEFAULT.findall(text):
        try:
            found[name] = str(ast.literal_eval(value))
        except (ValueError, SyntaxError):
            continue  # a default that is computed
    return found


def _tuned(root: Path) -> tuple[str, ...]:
    names: list[str] = []
    for folder in _TABLES:
        with contextlib.suppress(OSError):
            names += os.listdir(root / folder)
    return tuple(sorted({match[1] for name in names if (match := _TABLE.fullmatch(name))}))


def _function(file: str, text: str, name: str) -> tuple[Location | None, str]:
    """Where the module-level function `name` starts, and its source."""
    match = re.search(rf"^def {name}\(.*?(?=^[^\s)]|\Z)", text, re.M | re.S)
    if match is None:
        return None, ""
    line = text.count("\n", 0, match.start()) + 1
    return Location(file, line, name, f"def {name}("), match.group()


def _last_line(file: str, text: str, match: re.Match[str] | None) -> Location | None:
    """The last line that `match` covers."""
    if match is None:
        return None
    line = text.count("\n", 0, match.end()) + 1
    return Location(file, line, None, text.splitlines()[line - 1].strip())


def _value_bytes(body: str) -> int | None:
    """The width of the keys that the indexer unpacks: by the type it converts them to."""
    match = re.search(r"kv_value = .*\.to\(torch\.(float32|bfloat16|float16)\)", body)
    return None if match is None else 4 if match.group(1) == "float32" else 2


def _rows_at_once(body: str) -> int | None:
    """By the constant that the indexer holds its batch against before it calls itself."""
    match = re.search(r"^    (\w+) = (\d+)\n    if batch_size > \1:$", body, re.M)
    return None if match is None else int(match.group(2))


def _plain_activation(text: str) -> Location | None:
    """The activation between the two grouped products of NVFP4 experts, where the function that
    holds them knows no clamp."""
    start, body = _function(_GROUPED, text, "cutlass_moe_fp4")
    match = re.search(r"^ +((?:\S.*\b)?silu_and_mul\w*\(.*)$", body, re.M)
    if start is None or match is None or "swiglu_limit" in body:
        return None
    line = start.line + body.count("\n", 0, match.start())
    return Location(_GROUPED, line, start.function, match.group(1).strip())


def _split_scratch(file: str, text: str) -> Location | None:
    """The allocation of the page split, where it copies touched pages into memory that nobody
    has written."""
    start, body = _function(file, text, "_split_kv_pages_to_64")
    if start is None or "touched_indices" not in body:
        return None
    for offset, line in enumerate(body.splitlines()):
        if re.search(r"\bbuf = torch\.empty\(", line):
            return Location(file, start.line + offset, start.function, line.strip())
    return None
