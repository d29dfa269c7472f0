"""Whether layers that a fix moves came to a kernel: shared by the fixes about routed experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dsv4doctor.models import Layer


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
