"""Where routed experts are and where they came to: shared by the fixes about them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dsv4doctor.models import Facts, Layer

ROUTED = "flashinfer_trtllm_routed"
"""SM100's runner for NVFP4 experts."""
NVFP4_METHOD = "ModelOptNvFp4FusedMoEMethod"


def auto_is_routed(facts: Facts) -> bool:
    """Whether `--moe-runner-backend auto`, said or not, became SM100's runner in this launch."""
    return any(
        change.name == "moe_runner_backend" and change.before == "auto" and change.after == ROUTED
        for change in (facts.trace.arg_changes if facts.trace else ())
    )


def not_moved(
    before: Sequence[Layer], after: Sequence[Layer], stays: Callable[[Layer], bool], still: str
) -> tuple[str, ...]:
    """What did not come out for the layers of `before` for which `stays` held.

    `stays`: the layer is where the fix found it, which `still` says in words.
    """
    planned = {layer.name for layer in before if stays(layer)}
    missing = planned - {layer.name for layer in after}
    wrong = [f"{name} is not built any more" for name in sorted(missing)]
    for layer in after:
        if layer.name not in planned:
            continue
        if stays(layer):
            wrong.append(f"{layer.name} {still}")
        elif layer.error is not None:
            wrong.append(f"{layer.name}: {layer.error.type}: {layer.error.message}")
        elif layer.kernel is None:
            wrong.append(f"{layer.name} reaches no kernel: {layer.reason}")
    return tuple(wrong)
