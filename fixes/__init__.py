"""Source patches for an SGLang tree: one fix a file, each with the examples that are its tests."""

from __future__ import annotations

from dsv4doctor.fixes import (
    dense_glue,
    draft_moe_dispatch,
    environment_overwritten,
    indexer,
    main_moe_auto,
    sparse_mla,
    swiglu_limit,
)
from dsv4doctor.fixes.fix import Fix

ALL: tuple[Fix, ...] = (
    # Before the other two: what it hands over decides on main_moe_auto's backend, and in one file
    # its places stand behind draft_moe_dispatch's, whose lines so keep their numbers.
    swiglu_limit.FIX,
    draft_moe_dispatch.FIX,
    main_moe_auto.FIX,
    indexer.FIX,
    sparse_mla.FIX,
    dense_glue.FIX,
    environment_overwritten.FIX,
)
"""Every fix, in the order in which they are planned."""
