"""FP8 experts taken for MXFP4 because the checkpoint is not in the local cache yet.

SGLang probes the experts' tensors in a local snapshot.  On a first start from a Hugging Face id
there is none, and `SGLANG_DSV4_FP4_EXPERTS` decides, whose default is true.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dsv4doctor.models import Facts, Finding, HostFacts, Remedy, Severity, StoredFormat
from dsv4doctor.rules.common import in_effect, is_true, set_by_user, with_source
from dsv4doctor.rules.rule import Example, NotChecked, Rule
from dsv4doctor.rules.samples import SOURCES, checkpoint, scene

_VARIABLE = "SGLANG_DSV4_FP4_EXPERTS"


def check(facts: Facts) -> Iterator[Finding]:
    assert facts.features is not None
    assert facts.snapshot.checkpoint is not None
    launch, host = facts.snapshot.launch, facts.snapshot.host
    stored = {layer.stored_format for layer in facts.snapshot.checkpoint.main_layers}
    if stored != {StoredFormat.FP8_BLOCK} or facts.features.probes_experts is None:
        return
    if set_by_user(facts, _VARIABLE) is not None or not is_true(in_effect(facts, _VARIABLE)):
        return
    if launch is None or launch.model is None or not _may_be_id(launch.model):
        return
    if host is None or (host.hub_model == launch.model and host.hub_model_cached is None):
        raise NotChecked("whether the model is in the server's hub cache is not known")
    if host.hub_model != launch.model or host.hub_model_cached:
        return
    yield Finding(
        rule=RULE.id,
        severity=Severity.ERROR,
        subject=_VARIABLE,
        message=(
            f"{launch.model} stores FP8 experts and is not in the local hub cache, so SGLang "
            "cannot probe them and takes them for MXFP4."
        ),
        consequence="The first start fails while it loads the experts' weights.",
        evidence=(
            "stored format FP8 block, from the safetensors headers",
            f"{_VARIABLE} is not set; its default is {in_effect(facts, _VARIABLE)}",
            f"probe of a local snapshot only at {with_source(facts.features.probes_experts)}",
        ),
        locations=(facts.features.probes_experts,),
        remedy=Remedy(
            f"Export {_VARIABLE}=0, or download the model first: `hf download {launch.model}`."
        ),
    )


def _may_be_id(model: str) -> bool:
    return model.count("/") == 1 and not model.startswith(("/", ".", "~"))


RULE = Rule(
    id="DSV302",
    title="FP8 experts not probed on a cold cache",
    severity=Severity.ERROR,
    reads=("trace", "checkpoint", "launch", "features"),
    check=check,
)

_FP8 = checkpoint(StoredFormat.FP8_BLOCK, StoredFormat.FP8_BLOCK, None, None)
_ID = "org/DeepSeek-V4-Flash-FP8"
_COLD = HostFacts(hub_model=_ID, hub_model_cached=False)

EXAMPLES = (
    Example(
        "a cold cache",
        scene(checkpoint=_FP8, path=_ID, host=_COLD),
        expect=(_VARIABLE,),
    ),
    Example(
        "downloaded",
        scene(checkpoint=_FP8, path=_ID, host=replace(_COLD, hub_model_cached=True)),
    ),
    Example("a folder", scene(checkpoint=_FP8, path="/models/v4", host=HostFacts())),
    Example(
        "told so",
        scene(checkpoint=_FP8, path=_ID, host=_COLD, environment={_VARIABLE: "0"}),
    ),
    Example("MXFP4 experts", scene(path=_ID, host=_COLD)),
    Example(
        "an SGLang that does not probe",
        scene(
            checkpoint=_FP8,
            path=_ID,
            host=_COLD,
            features=replace(SOURCES, probes_experts=None),
        ),
    ),
)
