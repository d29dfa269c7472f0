"""SGLang's flags as a user wrote them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dsv4doctor.models import Launch

MAIN_FLAG = "--moe-runner-backend"
DRAFT_FLAG = "--speculative-moe-runner-backend"
MODEL_FLAGS = ("--model-path", "--model")


def flag_value(flags: Sequence[str], name: str) -> str | None:
    """The value of the flag `name`; the last one counts."""
    value = None
    for index, flag in enumerate(flags):
        if flag == name and index + 1 < len(flags):
            value = flags[index + 1]
        elif flag.startswith(f"{name}="):
            value = flag.partition("=")[2]
    return value


def without(flags: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """`flags` without the named ones and their values."""
    kept: list[str] = []
    dropping = False
    for flag in flags:
        if flag.startswith("--"):
            dropping = flag.partition("=")[0] in names
        if not dropping:
            kept.append(flag)
    return tuple(kept)


def written_out(launch: Launch) -> tuple[str, ...]:
    """The launch's flags, those of the file that --config names in the place of that flag."""
    if not launch.configured:
        return launch.flags
    return without(launch.all_flags, (*MODEL_FLAGS, "--config"))


def without_speculation(flags: Sequence[str]) -> tuple[str, ...]:
    names = [flag.partition("=")[0] for flag in flags if flag.startswith("--speculative-")]
    return without(flags, names)


# ------------------------------------------------------------------------------ other engines


@dataclass(frozen=True)
class OtherOption:
    """An option of another engine, and what SGLang has for it."""

    engine: str
    sglang: str | None
    """SGLang's option; None: it has none."""
    note: str = "SGLang has no such option"


_VLLM, _TRTLLM = "vLLM", "TensorRT-LLM"

ENGINES: dict[str, OtherOption] = {
    "--gpu-memory-utilization": OtherOption(_VLLM, "--mem-fraction-static"),
    "--max-model-len": OtherOption(_VLLM, "--context-length"),
    "--max-num-seqs": OtherOption(_VLLM, "--max-running-requests"),
    "--max-num-batched-tokens": OtherOption(_VLLM, "--chunked-prefill-size"),
    "--enforce-eager": OtherOption(_VLLM, "--disable-cuda-graph"),
    "--enable-expert-parallel": OtherOption(_VLLM, "--ep-size with the number of GPUs"),
    "--block-size": OtherOption(_VLLM, "--page-size"),
    "--no-enable-prefix-caching": OtherOption(_VLLM, "--disable-radix-cache"),
    "--enable-prefix-caching": OtherOption(_VLLM, None, "SGLang's radix cache is on by default"),
    "--enable-chunked-prefill": OtherOption(_VLLM, None, "it is on in SGLang by default"),
    "--enable-auto-tool-choice": OtherOption(_VLLM, None, "--tool-call-parser is enough in SGLang"),
    "--speculative-config": OtherOption(_VLLM, "--speculative-algorithm and its companions"),
    "--kv-transfer-config": OtherOption(_VLLM, "--disaggregation-mode and its companions"),
    "--max_batch_size": OtherOption(_TRTLLM, "--max-running-requests"),
    "--max_seq_len": OtherOption(_TRTLLM, "--context-length"),
    "--max_num_tokens": OtherOption(_TRTLLM, "--chunked-prefill-size"),
    "--kv_cache_free_gpu_memory_fraction": OtherOption(_TRTLLM, "--mem-fraction-static"),
    "--tp_size": OtherOption(_TRTLLM, "--tp-size"),
    "--ep_size": OtherOption(_TRTLLM, "--ep-size"),
    "--extra_llm_api_options": OtherOption(_TRTLLM, "--config"),
}
"""The options that launch commands for DeepSeek-V4 carry over most."""


def foreign_options(flags: Sequence[str]) -> tuple[str, ...]:
    """The options in `flags` that are another engine's, in their order."""
    names = [flag.partition("=")[0] for flag in flags]
    return tuple(dict.fromkeys(name for name in names if name in ENGINES))


def advice(refused: Sequence[str], known: Iterable[str]) -> str | None:
    """What to write instead of the options that SGLang refused; None: nothing to suggest.

    `known` are the options that this SGLang has.
    """
    own = sorted(known)
    said = []
    for name in dict.fromkeys(flag.partition("=")[0] for flag in refused if flag[:2] == "--"):
        other = ENGINES.get(name)
        if other is not None:
            instead = f"SGLang's is {other.sglang}" if other.sglang else other.note
            said.append(f"{name} is {other.engine}'s: {instead}")
            continue
        close = difflib.get_close_matches(name, own, n=1, cutoff=0.8)
        if close:
            said.append(f"{name}: did you mean {close[0]}?")
    return "; ".join(said) or None


def options_of(sources: Iterable[str]) -> set[str]:
    """The command-line options that SGLang's sources declare, by name or by their field."""
    found: set[str] = set()
    for text in sources:
        found.update(re.findall(r"[\"'](--[a-z][a-z0-9-]+)[\"']", text))
        fields = re.findall(r"^    ([a-z][a-z0-9_]*): (?:A\[|Annotated\[)", text, re.MULTILINE)
        found.update("--" + field.replace("_", "-") for field in fields)
    return found
