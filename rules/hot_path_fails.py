"""A hot path beside the routed experts that does not run on the GPU.

Attention, indexer, dense GEMM, hyper-connections: SGLang's own layers were run through to the
kernel that they reach, and that kernel is not for this GPU, or SGLang itself raises on the way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from dsv4doctor.commands import launch_change, server_command
from dsv4doctor.models import (
    IMPORTS,
    Alternative,
    Facts,
    Finding,
    HotPath,
    Kernel,
    Location,
    Remedy,
    Role,
    Severity,
    SglangError,
    Verdict,
)
from dsv4doctor.rules.common import both, described, flag, with_source
from dsv4doctor.rules.rule import Example, NotChecked, Rule
from dsv4doctor.rules.samples import scene

_WHEN = {
    "-prefill": "reads a prompt of such a size",
    "-decode": "decodes, in CUDA graph capture if not before",
}
_WORDS = {"mla": "MLA", "fp8": "FP8", "mhc": "mHC", "kv": "KV"}
_ONLY_IN = {"decode": "-decode", "prefill": "-prefill"}
"""Of a prefill/decode pair each side has one phase."""


def check(facts: Facts) -> Iterator[Finding]:
    assert facts.trace is not None
    if not facts.trace.paths:
        raise NotChecked("the hot paths were not traced", required=False)
    found: dict[tuple[Role, str], list[HotPath]] = {}
    for path in facts.trace.failing_paths:
        if path.error is not None and path.error.phase == IMPORTS:  # DSV405 says what to install
            continue
        if not _is_other_sides(facts, path.name):
            found.setdefault((path.role, path.name), []).append(path)
    for paths in found.values():
        yield _finding(facts, paths)


def _is_other_sides(facts: Facts, name: str) -> bool:
    own = _ONLY_IN.get(flag(facts, "--disaggregation-mode") or "")
    return own is not None and name.endswith(tuple(_WHEN)) and not name.endswith(own)


def _finding(facts: Facts, paths: Sequence[HotPath]) -> Finding:
    first, arch = paths[0], facts.arch.name
    what = " ".join(_WORDS.get(word, word) for word in first.name.split("-"))
    when = next((text for end, text in _WHEN.items() if first.name.endswith(end)), "runs")
    if first.error is not None:
        place = first.error.at
        said = f"stops with {first.error.type}, raised at {described(place)}"
    else:
        place = first.kernel.call_site if first.kernel else None
        kernel = first.kernel.symbol.rpartition(".")[2] if first.kernel else "a kernel"
        said = f"reaches {kernel}, which does not run on {arch}, called at {described(place)}"
    places = [place for path in paths if (place := _place(path) or path.decided_at)]
    return Finding(
        rule=RULE.id,
        severity=Severity.ERROR,
        subject=f"{first.role.value} {first.name}",
        message=f"The {first.role.value} model's {what} {said}.",
        consequence=f"The server loads the weights and dies when this model first {when}.",
        evidence=tuple(dict.fromkeys(text for path in paths for text in _evidence(path))),
        locations=tuple(dict.fromkeys(places)),
        remedy=_remedy(facts, paths),
    )


def _place(path: HotPath) -> Location | None:
    if path.error is not None:
        return path.error.at
    return path.kernel.call_site if path.kernel else None


def _evidence(path: HotPath) -> Iterator[str]:
    yield path.reason
    if path.kernel is not None:
        yield f"reaches {path.kernel.symbol}"
    count = f"{len(path.layers)} layers" if len(path.layers) != 1 else path.layers[0]
    yield f"{count}: {path.detail}" if path.detail else count
    if path.decided_at is not None and described(path.decided_at) != described(_place(path)):
        yield f"decided at {with_source(path.decided_at)}"
    if path.flags_consulted:
        yield f"the deciding code read {both(path.flags_consulted)}"


def _remedy(facts: Facts, paths: Sequence[HotPath]) -> Remedy:
    assert facts.trace is not None
    version, tried = facts.trace.sglang.version, facts.path_alternatives
    works = next((option for option in tried if option.problem is None), None)
    if works is not None:
        return _change(facts, works, version)
    failed = "; ".join(f"{option.change} ({option.problem})" for option in tried)
    lines = [f"Does not help: {failed}."] if failed else []
    read = {name for path in paths for name in path.flags_consulted}
    if not tried and not read:
        lines.append(f"SGLang {version} reads no flag and no variable on its way to this kernel.")
    lines.append("Try another release: `dsv4doctor check --sglang VERSION` tells before a start.")
    return Remedy("\n".join(lines))


def _change(facts: Facts, option: Alternative, version: str) -> Remedy:
    exported = [f"{name}={value}" for name, value in option.environment.items()]
    lines = [f"Traced with SGLang {version}, and runs: {option.change}."]
    lines += [f"Export {text}." for text in exported]
    change = launch_change(facts, option.flags)
    lines += [change] if change else []
    launch = facts.snapshot.launch
    if launch is not None:
        environment = {**launch.environment, **option.environment}
        changed = replace(facts.snapshot, launch=replace(launch, environment=environment))
        facts = replace(facts, snapshot=changed)
    command = server_command(facts, option.flags)
    return Remedy("\n".join(lines), (command,) if command else ())


RULE = Rule(
    id="DSV209",
    title="Hot path that does not run on the GPU",
    severity=Severity.ERROR,
    reads=("trace",),
    check=check,
)

_BACKEND = "sglang/srt/layers/attention/deepseek_v4_backend.py"
_SWITCH = "SGLANG_OPT_FLASHMLA_SPARSE_PREFILL"
_PREFILL = HotPath(
    name="sparse-mla-prefill",
    role=Role.MAIN,
    layers=("model.layers.0.self_attn", "model.layers.1.self_attn"),
    choice="flashmla",
    kernel=Kernel("sgl_kernel.flash_mla.flash_mla_sparse_fwd", Location(_BACKEND, 1560)),
    decided_at=Location(_BACKEND, 1560, "_forward_prefill_sparse"),
    flags_consulted=(_SWITCH,),
    verdict=Verdict.FAILS,
    reason="flash_mla_sparse_fwd (FlashMLA) exists for sm_90, sm_100 and sm_103 only",
    detail="compress ratio 0; 256 tokens",
)
"""SGLang 0.5.15.post1 on sm_120."""
_RAISES = replace(
    _PREFILL,
    name="indexer-decode",
    role=Role.DRAFT,
    kernel=None,
    error=SglangError("draft", "NotImplementedError", "no such indexer", Location(_BACKEND, 7)),
)


def _tracing(*paths: HotPath, flags: tuple[str, ...] = (), helps: bool = False) -> Facts:
    sample = scene(version="0.5.15.post1", flags=flags)
    assert sample.trace is not None
    way = Alternative(f"{_SWITCH}=0", flags, None, environment={_SWITCH: "0"})
    trace = replace(sample.trace, paths=paths)
    return replace(sample, trace=trace, path_alternatives=(way,) if helps else ())


EXAMPLES = (
    Example(
        "FlashMLA's prefill on sm_120, and a switch that helps",
        _tracing(_PREFILL, replace(_PREFILL, detail="compress ratio 4; 256 tokens"), helps=True),
        expect=("main sparse-mla-prefill",),
    ),
    Example("SGLang raises", _tracing(_RAISES), expect=("draft indexer-decode",)),
    Example(
        "a decode server reads no prompts",
        _tracing(_PREFILL, flags=("--disaggregation-mode", "decode")),
    ),
    Example("a kernel that exists", _tracing(replace(_PREFILL, verdict=Verdict.RUNS))),
)
