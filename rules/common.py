"""What more than one rule says or asks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from packaging.version import InvalidVersion, Version

from dsv4doctor.alternatives import DROPS_CLAMP
from dsv4doctor.commands import doctor_command, launch_change, server_command
from dsv4doctor.facts.callsite import text_at
from dsv4doctor.flags import DRAFT_FLAG, MAIN_FLAG, flag_value, without, written_out
from dsv4doctor.models import (
    Alternative,
    Facts,
    Layer,
    Location,
    Remedy,
    Role,
    StoredFormat,
    Trace,
    TreeFeatures,
    Verdict,
)
from dsv4doctor.rules.rule import NotChecked


def backend_flags(facts: Facts, role: Role) -> dict[str, str]:
    """The MoE backend flags that the user set and a reader expects to count for `role`."""
    launch = facts.snapshot.launch
    names = (MAIN_FLAG,) if role is Role.MAIN else (MAIN_FLAG, DRAFT_FLAG)
    found = {name: flag_value(launch.all_flags, name) for name in names} if launch else {}
    return {name: value for name, value in found.items() if value is not None}


def ignored_flags(facts: Facts, layer: Layer) -> dict[str, str]:
    """Those of `backend_flags` that the code deciding about `layer` never read."""
    set_flags = backend_flags(facts, layer.role)
    consulted = set(layer.flags_consulted)
    if layer.role is Role.DRAFT and _argument(DRAFT_FLAG) in consulted:
        return {}  # it stands in for the main flag, which is its default
    return {name: value for name, value in set_flags.items() if _argument(name) not in consulted}


def _argument(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def flag(facts: Facts, name: str) -> str | None:
    """The value of SGLang's flag `name` as the user wrote it."""
    launch = facts.snapshot.launch
    return flag_value(launch.all_flags, name) if launch else None


def numa_nodes(flags: Sequence[str]) -> list[int]:
    """The numbers after --numa-node, which takes one for every GPU."""
    found: list[int] = []
    reading = False
    for text in flags:
        if text.startswith("--"):
            name, _, text = text.partition("=")
            reading = name == "--numa-node"
        if reading and text.isdigit():
            found.append(int(text))
    return found


def is_speculative(facts: Facts, algorithm: str) -> bool:
    """True when the launch asks for this speculative algorithm."""
    return (flag(facts, "--speculative-algorithm") or "").upper() == algorithm


def is_v41(facts: Facts) -> bool:
    checkpoint = facts.snapshot.checkpoint
    return checkpoint is not None and checkpoint.config.get("model_type") == "deepseek_v41"


def set_by_user(facts: Facts, name: str) -> str | None:
    """The environment variable `name` as the launch, or else the machine, sets it.

    What is in a container has only what it is given."""
    launch = facts.snapshot.launch
    own = launch.environment.get(name) if launch else None
    if launch is not None and launch.in_container:
        return own
    return facts.snapshot.environment.get(name) if own is None else own


def in_effect(facts: Facts, name: str) -> str | None:
    """The environment variable `name` as the server will see it: what SGLang itself sets, else
    the user's value, else the default of this SGLang.  None: it does not know the variable.

    Raises NotChecked where SGLang stopped before it had set what it sets."""
    if facts.trace is not None and stopped_early(facts.trace):
        raise NotChecked("SGLang stops before it has settled its environment", required=False)
    overwritten = facts.trace.environment_overwritten.get(name) if facts.trace else None
    if overwritten is not None:
        return overwritten[1]
    default = facts.features.environment_defaults.get(name) if facts.features else None
    return default if (value := set_by_user(facts, name)) is None else value


def stopped_early(trace: Trace) -> bool:
    """True where SGLang did not get to the end of resolving its arguments."""
    return any(error.phase == "arguments" for error in trace.errors) or any(
        text.startswith("arguments") for text in trace.unresolved
    )


def is_true(value: str | None) -> bool:
    return value is not None and value.strip().lower() in ("1", "true", "yes", "y", "on")


def same_value(one: str, other: str) -> bool:
    """True for two spellings of one value: "1" and "True"."""
    false = ("0", "false", "no", "n", "off")
    return one == other or (
        (is_true(one) and is_true(other))
        or (one.strip().lower() in false and other.strip().lower() in false)
    )


def uses_flashinfer_mla(facts: Facts) -> bool:
    """True on sm_12x where SGLang's sparse MLA goes to FlashInfer."""
    name = "SGLANG_SM120_FLASHMLA_BACKEND"
    if not facts.arch.is_sm12x or facts.features is None:
        return False
    known = name in facts.features.environment_defaults
    return known and in_effect(facts, name) == "flashinfer"


def flashinfer_source(facts: Facts) -> str:
    """Where `flashinfer_version` has it from, for the evidence."""
    version = flashinfer_version(facts)
    borrowed = facts.trace is None or facts.trace.sglang.borrowed
    where = f"pinned by SGLang {facts.trace.sglang.version}" if borrowed and facts.trace else ""
    return f"FlashInfer {version}, {where or 'installed'}"


TRITON_MLA = "SGLANG_SM120_FLASHMLA_BACKEND=triton"


def call_text(facts: Facts, layer: Layer) -> str:
    return text_at(facts.call_texts, layer)


def is_nvfp4_cutlass(layer: Layer) -> bool:
    """Whether it is FlashInfer's CUTLASS MoE that computes a layer of ModelOpt's NVFP4."""
    symbol = layer.kernel.symbol if layer.kernel else ""
    by_modelopt = layer.quant_method == "ModelOptNvFp4FusedMoEMethod"
    return by_modelopt and symbol.endswith(".cutlass_fused_moe")


def described(location: Location | None) -> str:
    if location is None:
        return "a place that the trace could not name"
    return f"{location.file}:{location.line}"


def with_source(location: Location) -> str:
    source = f": {location.source}" if location.source else ""
    return f"{described(location)}{source}"


def both(names: Sequence[str]) -> str:
    """ "a", "a and b" or "a, b and c"."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def flashinfer_version(facts: Facts) -> Version | None:
    """The FlashInfer that will serve: what is installed, or what a borrowed SGLang pins."""
    stack, tree = facts.snapshot.stack, facts.trace.sglang if facts.trace else None
    packages = {package.name: package for package in stack.packages} if stack else {}
    package = packages.get("flashinfer-python")
    if package is None:
        return None
    pinned = (package.required or "").removeprefix("==")
    try:
        return Version(pinned if tree is None or tree.borrowed else package.version or pinned)
    except InvalidVersion:
        return None


def way_out(facts: Facts, layer: Layer | None) -> Remedy:
    """What to do about routed experts that cannot run: what was traced and does run.

    `layer` is None when SGLang stopped before there was one.
    """
    working = [option for option in facts.alternatives if option.problem is None]
    failing = [option for option in facts.alternatives if option.problem is not None]
    version = facts.trace.sglang.version if facts.trace else "this release"
    sentences = []
    if working:
        changes = "; ".join(_with_verdict(option) for option in working)
        sentences.append(f"Traced with SGLang {version}, and runs: {changes}.")
        scale = _marlin_scale(facts, [layer for option in working for layer in option.layers])
        sentences += [scale] if scale is not None else []
    if failing:
        reasons = "; ".join(f"{option.change} ({option.problem})" for option in failing)
        sentences.append(f"Does not help: {reasons}.")
    is_draft = layer is not None and layer.role is Role.DRAFT
    if layer is not None and is_draft and not layer.flags_consulted:
        sentences.append(_PATCH_ONLY)
    if is_draft and not facts.alternatives:
        sentences.append("Without the --speculative-* flags there is no draft model to fail.")
    patched = _patched(facts, layer)
    if patched is not None:
        sentences.append(patched.text)
    if _is_hybrid(facts):
        sentences.append(_original(facts))
    if working and facts.trace is not None and facts.trace.failing_paths:
        sentences.append("That is about the routed experts: DSV209 has to be mended as well.")
    if not sentences:
        sentences.append(_CHANGE if layer is None or layer.error is not None else _ANOTHER)
    changes_to_make = [launch_change(facts, option.flags) for option in working]
    sentences += [text for text in changes_to_make if text is not None]
    commands = [server_command(facts, option.flags) for option in working]
    found = tuple(text for text in commands if text is not None)
    found += patched.commands if patched is not None else ()
    return Remedy("\n".join(sentences), found, _fix_for(facts, layer))


def _patched(facts: Facts, layer: Layer | None) -> Remedy | None:
    """The way that keeps speculation: main experts on CUTLASS, where all that speaks against it is
    the clamp, which FIX103 passes on, and a draft that FIX101 sends elsewhere."""
    launch = facts.snapshot.launch
    if launch is None or _fix_for(facts, layer) != "FIX101":
        return None
    for option in facts.alternatives:
        backend = flag_value(option.flags, MAIN_FLAG)
        main = [one for one in option.layers if one.role is Role.MAIN]
        works = all(is_nvfp4_cutlass(one) and one.verdict is Verdict.RUNS for one in main)
        if option.problem != DROPS_CLAMP or backend is None or not main or not works:
            continue
        flags = (*without(written_out(launch), (MAIN_FLAG, DRAFT_FLAG)), MAIN_FLAG, backend)
        change = launch_change(facts, flags)
        changed = replace(
            facts, snapshot=replace(facts.snapshot, launch=replace(launch, flags=flags))
        )
        command = doctor_command(changed, "fix", "--only", "FIX101", "--only", "FIX103")
        text = (
            f"To keep speculative decoding and the clamp: {MAIN_FLAG} {backend} with the fixes "
            "FIX101 and FIX103; `dsv4doctor fix --apply` proves by a trace that it runs, or "
            f"changes nothing.{f' {change}' if change else ''}"
        )
        return Remedy(text, (command,) if command else ())
    return None


def marlin_scale(
    features: TreeFeatures | None, stored: StoredFormat | None, kernel: str | None
) -> str | None:
    """What NVFP4 experts on Marlin take for granted in this tree; None: none."""
    where = features.marlin_one_scale if features is not None else None
    if where is None or stored is not StoredFormat.NVFP4 or "marlin" not in (kernel or ""):
        return None
    return (
        f"Marlin takes the gate's scale (w1) for w3 too ({described(where)}): where a checkpoint's "
        'differ SGLang logs "w1_weight_scale_2 must match w3_weight_scale_2" and answers can be '
        "worse, which no header shows."
    )


def _marlin_scale(facts: Facts, layers: Iterable[Layer]) -> str | None:
    found = (
        marlin_scale(facts.features, layer.stored_format, layer.kernel.symbol)
        for layer in layers
        if layer.kernel is not None
    )
    return next((text for text in found if text is not None), None)


def _with_verdict(option: Alternative) -> str:
    """The change, and that it comes to a fallback where it does."""
    is_fallback = any(layer.verdict is Verdict.FALLBACK for layer in option.layers)
    return f"{option.change} (a fallback)" if is_fallback else option.change


def _fix_for(facts: Facts, layer: Layer | None) -> str | None:
    """The fix that sends these routed experts elsewhere on this GPU."""
    if layer is None or not (facts.arch.is_sm12x or facts.arch.major == 9):
        return None
    if layer.role is Role.DRAFT:
        return "FIX101" if layer.quant_method == "Mxfp4FlashinferTrtllmMoEMethod" else None
    changes = facts.trace.arg_changes if facts.trace else ()
    chosen = any(
        change.name == "moe_runner_backend" and change.after == "flashinfer_trtllm_routed"
        for change in changes
    )
    return "FIX102" if chosen and facts.arch.is_sm12x else None


_PATCH_ONLY = (
    "No flag changes the draft's method: to keep speculative decoding, SGLang has to be patched "
    "to return Mxfp4FlashinferCutlassMoEMethod there (sgl-project/sglang pull request 40173). "
    "That method serves sm_12x from SGLang 0.5.16 on; before, it is made for SM90, and "
    "Mxfp4MarlinMoEMethod is what is left."
)
_CHANGE = "Change the flag or the file that the message names."
_ANOTHER = (
    "Leave --quantization and the backend flags out, or try another release (--sglang VERSION): "
    "`dsv4doctor check` tells before anything is started."
)
_MADE_FROM = re.compile(r"DeepSeek-V4(?:-Flash|-Pro|-Flash-0731|-Pro-0813|\.1-Flash)(?=-NVFP4)")


def _original(facts: Facts) -> str:
    """The way out through the checkpoint that a hybrid one was made from."""
    checkpoint = facts.snapshot.checkpoint
    known = _MADE_FROM.search(checkpoint.name) if checkpoint else None
    name = f", deepseek-ai/{known[0]}," if known else ""
    return (
        f"The MXFP4 checkpoint this one was made from{name} takes another path, for main and "
        "draft alike: try it with `dsv4doctor check`."
    )


def _is_hybrid(facts: Facts) -> bool:
    """True where SGLang knows the checkpoint as NVFP4 and the GPU is one of sm_12x."""
    layers = facts.trace.layers if facts.trace else ()
    known = any(layer.quant_method == "ModelOptNvFp4FusedMoEMethod" for layer in layers)
    return facts.arch.is_sm12x and known and _stores_nvfp4(facts)


def _stores_nvfp4(facts: Facts) -> bool:
    checkpoint = facts.snapshot.checkpoint
    stored = {layer.stored_format for layer in checkpoint.main_layers} if checkpoint else set()
    return stored == {StoredFormat.NVFP4}
