"""Source patches for an SGLang tree: one fix a file, each with the examples that are its tests."""

from __future__ import annotations

from dsv4doctor.fixes import draft_moe_dispatch
from dsv4doctor.fixes.fix import Fix

ALL: tuple[Fix, ...] = (draft_moe_dispatch.FIX,)
"""Every fix, in the order in which they are planned."""
