"""Routed experts on a kernel that exists for SM100 alone: the check that two rules share."""

from __future__ import annotations

from collections.abc import Iterator

from dsv4doctor.folding import LayerRange, fold
from dsv4doctor.models import Facts, Finding, Layer, Location, Role, Severity
from dsv4doctor.rules.common import (
    both,
    call_text,
    described,
    flashinfer_version,
    ignored_flags,
    way_out,
    with_source,
)
from dsv4doctor.verdicts import KnownKernel, known_kernel


def findings(facts: Facts, role: Role, rule: str) -> Iterator[Finding]:
    assert facts.trace is not None
    for layers in fold(facts.trace.of(role)):
        layer = layers.layer
        known = known_kernel(layer, call_text(facts, layer))
        if layer.error is not None or known is None or not known.sm100:
            continue
        if not known.exists_for(facts.arch):
            yield _finding(facts, layers, rule, known)


def _finding(facts: Facts, layers: LayerRange, rule: str, known: KnownKernel) -> Finding:
    layer, arch = layers.layer, facts.arch.name
    assert layer.kernel is not None
    whose = "The draft model's" if layer.role is Role.DRAFT else "The main model's"
    stored = f" ({layer.stored_format.value})" if layer.stored_format else ""
    runner = f" on the {layer.runner_backend} runner" if layer.runner_backend else ""
    kernel = layer.kernel.symbol.rpartition(".")[2]
    when = "draft model first runs" if layer.role is Role.DRAFT else "model first runs"
    return Finding(
        rule=rule,
        severity=Severity.ERROR,
        subject=layers.name,
        message=(
            f"{whose} routed experts{stored} resolve to {layer.quant_method}{runner}, whose "
            f"kernel is SM100-only ({known.gpus}), decided at {described(layer.decided_at)}."
        ),
        consequence=(
            f"On {arch} the server loads the weights and dies in {kernel} when the {when}"
            f"{_said(facts, known)}."
        ),
        evidence=(*_decisions(facts, layer), f"reaches {layer.kernel.symbol}"),
        locations=tuple(where for where in (layer.decided_at, layer.kernel.call_site) if where),
        remedy=way_out(facts, layer),
    )


def _said(facts: Facts, known: KnownKernel) -> str:
    """What the log will say, where that is known of the FlashInfer that serves."""
    version = flashinfer_version(facts)
    line = known.error_line(version, facts.arch) if version is not None else None
    return f' (FlashInfer {version}: "{line}")' if line else ""


def _decisions(facts: Facts, layer: Layer) -> Iterator[str]:
    if layer.decided_at is not None:
        yield f"decided at {with_source(layer.decided_at)}"
    changed = _backend_change(facts, layer)
    if changed is not None:
        yield changed
    ignored = ignored_flags(facts, layer)
    if ignored:
        named = both([f"{flag} {value}" for flag, value in ignored.items()])
        verb = "was" if len(ignored) == 1 else "were"
        yield f"{named} {verb} not consulted for it"


def _backend_change(facts: Facts, layer: Layer) -> str | None:
    """Where SGLang itself chose the backend that the layer's method went by."""
    if facts.trace is None or "moe_runner_backend" not in layer.flags_consulted:
        return None
    for change in facts.trace.arg_changes:
        if change.name == "moe_runner_backend":
            at: Location = change.at
            return f"moe_runner_backend: {change.before} -> {change.after} at {with_source(at)}"
    return None
