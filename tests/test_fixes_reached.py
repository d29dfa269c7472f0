"""What the fixes about routed experts take for a layer that was moved."""

from dataclasses import replace

from dsv4doctor.fixes.reached import not_moved
from dsv4doctor.models import Layer
from dsv4doctor.rules.samples import DRAFT_CUTLASS, DRAFT_TRTLLM


def _on_trtllm(layer: Layer) -> bool:
    return layer.quant_method == DRAFT_TRTLLM.quant_method


def _said(*after: Layer) -> tuple[str, ...]:
    return not_moved([DRAFT_TRTLLM], after, _on_trtllm, "is where it was")


def test_a_layer_on_another_kernel_is_moved() -> None:
    assert _said(DRAFT_CUTLASS) == ()


def test_a_layer_that_stays_that_is_gone_or_that_reaches_nothing_is_not() -> None:
    name = DRAFT_TRTLLM.name
    assert _said(DRAFT_TRTLLM) == (f"{name} is where it was",)
    assert _said() == (f"{name} is not built any more",)
    assert "reaches no kernel" in _said(replace(DRAFT_CUTLASS, kernel=None))[0]
