"""The launch that a log belongs to: its `server_args=` line or its command, read as data.

SGLang up to 0.5.18 logs `server_args=ServerArgs(name=value, ...)`, from 0.5.19 on
`server_args={'name': value, ...}`; both hold the arguments after SGLang's own resolution.
Nothing is evaluated.
"""

from __future__ import annotations

import ast
import re
import shlex
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from dsv4doctor.diagnose.lines import Line
from dsv4doctor.errors import UsageError
from dsv4doctor.launch import from_arguments
from dsv4doctor.models import Launch

_MAX = 1 << 16
_MAX_COMMAND = 1 << 14
_HEAD = re.compile(r"server_args=(ServerArgs\(|\{)")
_PAIR = re.compile(
    r"['\"]?(?P<name>[a-z][a-z0-9_]{1,80})['\"]?(?:=|: )"
    r"(?P<value>'(?:[^'\\]|\\.){0,2000}'|\"(?:[^\"\\]|\\.){0,2000}\""
    r"|\[[^\[\]]{0,2000}\]|None|True|False|-?\d[\d.eE+-]{0,30})(?=[,)}\s]|$)"
)
_COMMAND = re.compile(
    r"(?<!\S)(?P<command>(?:\S{0,200}python[\d.]{0,5} (?:-\S{1,20} ){0,3}-m sglang\.launch_server"
    r"|\S{0,200}sglang serve|\S{0,200}sglang/launch_server\.py) [^\n]{1,8000})"
)
_PLACEHOLDER = re.compile(r"<[^<>]*>")
_OWN_NAMES = {
    "fp8_gemm_runner_backend": "fp8-gemm-backend",
    "fp4_gemm_runner_backend": "fp4-gemm-backend",
}
_NAMES = """
    tp_size dp_size ep_size pp_size nnodes enable_dp_attention attn_dp_size attn_cp_size
    moe_dp_size moe_dense_tp_size dtype quantization kv_cache_dtype context_length load_format
    trust_remote_code json_model_override_args moe_runner_backend moe_a2a_backend deepep_mode
    flashinfer_mxfp4_moe_precision attention_backend prefill_attention_backend
    decode_attention_backend dsv4_attn_backend dsv4_prefill_backend fp8_gemm_runner_backend
    fp4_gemm_runner_backend bf16_gemm_backend page_size mem_fraction_static
    max_running_requests chunked_prefill_size disable_cuda_graph cuda_graph_max_bs
    cuda_graph_max_bs_decode disable_custom_all_reduce disable_shared_experts_fusion
    enable_deepseek_v4_fp4_indexer speculative_algorithm speculative_draft_model_path
    speculative_num_steps speculative_eagle_topk speculative_num_draft_tokens
    speculative_dspark_block_size speculative_moe_runner_backend speculative_moe_a2a_backend
    speculative_draft_attention_backend speculative_draft_model_quantization
    speculative_adaptive speculative_attention_mode enable_decoder_swa_bounded_replay
    disaggregation_mode disaggregation_transfer_backend
"""
_WANTED = frozenset(_NAMES.split())
"""The arguments with a say in which kernels run; the rest of a log's 400 are left out."""
_ONE = frozenset(("tp_size", "dp_size", "ep_size", "pp_size", "nnodes", "attn_dp_size",
                  "attn_cp_size", "moe_dp_size"))  # fmt: skip
_AS_NOTHING = frozenset(("null", "none", "{}", ""))


@dataclass(frozen=True)
class LoggedLaunch:
    line: int
    values: dict[str, object]
    """Every argument that could be read, by SGLang's field name; empty for a command."""
    launch: Launch
    is_command: bool
    """The command itself was logged: the flags are the user's own, not SGLang's resolution."""


def logged_launch(lines: Iterable[Line], source: str) -> LoggedLaunch | None:
    """The launch in `lines`, the last one first; the command where both are there."""
    command: LoggedLaunch | None = None
    arguments: LoggedLaunch | None = None
    for line in lines:
        arguments = _from_arguments(line, source) or arguments
        command = _from_command(line, source) or command
    if command is not None and arguments is not None:
        return replace(command, values=arguments.values)
    return command or arguments


def parse_arguments(text: str) -> tuple[dict[str, object], str | None]:
    """The values in a `server_args=` line, and what of it could not be read."""
    found = _HEAD.search(text)
    if found is None:
        return {}, None
    body = text[found.end(1) - (1 if found[1] == "{" else len(found[1])) :][:_MAX]
    whole = _parsed(body)
    if whole is not None:
        return whole, None
    pairs: dict[str, object] = {}
    for pair in _PAIR.finditer(body):
        value = _literal(pair["value"])
        if value is not _UNREAD:
            pairs.setdefault(pair["name"], value)
    return pairs, "the arguments are cut off or hold values that are no literals"


def _parsed(body: str) -> dict[str, object] | None:
    """Name -> value of a complete call or dict; None when it does not parse."""
    closing = body.rfind(")" if body.startswith("ServerArgs(") else "}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a damaged number is no news on our stderr
            tree = ast.parse(body[: closing + 1].strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    entries: list[tuple[object, ast.expr]] = []
    if isinstance(tree, ast.Call):
        entries = [(keyword.arg, keyword.value) for keyword in tree.keywords]
    elif isinstance(tree, ast.Dict):
        entries = [
            (key.value, value)
            for key, value in zip(tree.keys, tree.values, strict=True)
            if isinstance(key, ast.Constant)
        ]
    values: dict[str, object] = {}
    for name, node in entries:
        value = _literal(node)
        if isinstance(name, str) and value is not _UNREAD:
            values[name] = value
    return values or None


_UNREAD = object()


def _literal(node: str | ast.expr) -> object:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value: object = ast.literal_eval(node)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return _UNREAD
    return value


def _from_arguments(line: Line, source: str) -> LoggedLaunch | None:
    values, note = parse_arguments(line.text)
    if not values:
        return None
    model = values.get("model_path")
    launch = Launch(
        source=source,
        line=line.number,
        environment={},
        model=model if isinstance(model, str) and model else None,
        flags=_flags(values),
        notes=(note,) if note else (),
    )
    return LoggedLaunch(line.number, values, launch, is_command=False)


def _flags(values: Mapping[str, object]) -> tuple[str, ...]:
    flags: list[str] = []
    for name, value in values.items():
        if name not in _WANTED or value is None or value is False:
            continue
        if name in _ONE and value == 1:
            continue
        if isinstance(value, str) and value.lower() in _AS_NOTHING:
            continue
        flag = "--" + _OWN_NAMES.get(name, name.replace("_", "-"))
        if value is True:
            flags.append(flag)
        elif isinstance(value, (str, int, float)):
            flags += [flag, str(value)]
    return tuple(flags)


def _from_command(line: Line, source: str) -> LoggedLaunch | None:
    found = _COMMAND.search(line.text[:_MAX_COMMAND])
    if found is None or "--" not in found["command"]:
        return None
    try:
        words = shlex.split(found["command"].rstrip("'\")"))
    except ValueError:
        return None
    is_serve = "serve" in words[:3]
    if any(_PLACEHOLDER.fullmatch(word) for word in words):
        return None  # the example in launch_server's own warning, which most logs begin with
    start = words.index("serve") + 1 if is_serve else _program_end(words)
    rest = words[start:]
    positional = rest.pop(0) if is_serve and rest and not rest[0].startswith("-") else None
    try:
        launch = from_arguments(positional, rest, {})
    except UsageError:
        return None
    if launch.model is None:
        return None  # a sentence about the command, not the command
    launch = replace(launch, source=source, line=line.number)
    return LoggedLaunch(line.number, {}, launch, is_command=True)


def _program_end(words: list[str]) -> int:
    for index, word in enumerate(words):
        if word == "sglang.launch_server" or word.endswith("launch_server.py"):
            return index + 1
    return len(words)
