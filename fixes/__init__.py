"""Source patches for an SGLang tree: one fix a file, each with the examples that are its tests."""

from __future__ import annotations

from dsv4doctor.fixes import (
    draft_moe_dispatch,
    environment_overwritten,
    main_moe_auto,
    swiglu_limit,
)
from dsv4doctor.fixes.fix import Fix

ALL: tuple[Fix, ...] = (
    draft_moe_dispatch.FIX,
    swiglu_limit.FIX,
    main_moe_auto.FIX,
    environment_overwritten.FIX,
)
"""Every fix, in the order in which they are planned."""
