"""What a log says of its surroundings: engine, versions, GPU, which model failed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dsv4doctor.diagnose.args import LoggedLaunch
from dsv4doctor.diagnose.scan import Observation

_VERSION = r"v?(?P<version>\d{1,2}\.\d{1,3}(?:\.\d{1,3})?(?:\.?(?:post|rc|dev)\d{1,8})?)"
_SGLANG = re.compile(rf"(?i)\bsglang(?:[ _]version)?[-=: @/]{{1,4}}(?:image )?{_VERSION}")
_FLASHINFER = re.compile(
    rf"(?i)\bflashinfer(?:[-_]python)?(?:[ _]version)?[-=: @/]{{1,4}}{_VERSION}"
)
_VLLM = re.compile(
    r"\bvLLM (?:API server|engine|is using)|\bvllm[/.]v1|EngineCore|/vllm/|vllm serve"
)
_TRTLLM = re.compile(r"\[TensorRT-LLM\]|tensorrt_llm[/.]|trtllm-serve")
_SGLANG_MARK = re.compile(r"server_args=|sglang[/.]srt|sglang\.launch_server|Load weight begin")
_ARCHS = (
    (
        re.compile(
            r"\bGB10\b|DGX Spark|\b(?:sm_?|SM_?|compute_)121[af]?\b"
            r"|[Cc]apability:? \(?12[, .]{1,2}1\b"
        ),
        "sm_121",
    ),
    (
        re.compile(
            r"RTX PRO [456]000|RTX 50[5-9]0|\b(?:sm_?|SM_?|compute_)120[af]?\b"
            r"|[Cc]apability:? \(?12[, .]{1,2}0\b"
            r"|device_name=NVIDIA_RTX_(?:PRO|50)"
        ),
        "sm_120",
    ),
    (re.compile(r"\bG?B300\b|[Cc]apability:? \(?10[, .]{1,2}3\b"), "sm_103"),
    (re.compile(r"\bG?B200\b|[Cc]apability:? \(?10[, .]{1,2}0\b"), "sm_100"),
    (re.compile(r"\bH(?:100|200|20)\b|[Cc]apability:? \(?9[, .]{1,2}0\b"), "sm_90"),
)


@dataclass(frozen=True)
class LogFacts:
    engine: str
    """"sglang", "vllm", "tensorrt-llm" or "unknown"."""
    sglang: str | None
    flashinfer: str | None
    arch: str | None
    arch_source: str | None
    """"--arch", "the log", or None."""

    def lines(self, launch: LoggedLaunch | None) -> list[str]:
        """One line a fact, as the patterns of `requires`, `confirms` and `refutes` see them."""
        found = [f"engine {self.engine}"]
        for name, value in (
            ("sglang", self.sglang),
            ("flashinfer", self.flashinfer),
            ("arch", self.arch),
        ):
            if value is not None:
                found.append(f"{name} {value}")
        if launch is not None:
            found += [f"arg {name}={value}" for name, value in launch.values.items()]
            flags = launch.launch.flags
            found += [_as_argument(flags, index) for index in range(len(flags))]
            found.append(f"arg model_path={launch.launch.model}")
        return [line[:400] for line in found if line]


def read_facts(seen: Observation, arch: str | None) -> LogFacts:
    """The facts in what was seen; `arch` as given by the user, or None."""
    text = "\n".join(seen.start)
    around = "\n".join(
        sighting.window for tally in seen.tallies.values() for sighting in tally.kept
    )
    frames = "\n".join(frame.file for trace in seen.tracebacks for frame in trace.frames)
    everything = "\n".join((text, around, frames))
    facts = LogFacts(
        engine=_engine(everything, seen),
        sglang=_version(_SGLANG, everything),
        flashinfer=_version(_FLASHINFER, everything),
        arch=arch,
        arch_source="--arch" if arch else None,
    )
    if arch is not None:
        return facts
    named = next((name for pattern, name in _ARCHS if pattern.search(everything)), None)
    return replace(facts, arch=named, arch_source="the log" if named else None)


def _engine(text: str, seen: Observation) -> str:
    if seen.arguments or _SGLANG_MARK.search(text):
        return "sglang"
    if _VLLM.search(text):
        return "vllm"
    return "tensorrt-llm" if _TRTLLM.search(text) else "unknown"


def _version(pattern: re.Pattern[str], text: str) -> str | None:
    found = pattern.search(text)
    return found["version"] if found else None


def _as_argument(words: Sequence[str], index: int) -> str:
    name, equals, value = words[index].partition("=")
    if not name.startswith("--"):
        return ""
    following = words[index + 1] if index + 1 < len(words) else "True"
    shown = value if equals else (following if not following.startswith("--") else "True")
    return f"arg {name[2:].replace('-', '_')}={shown}"
