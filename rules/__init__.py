"""What really goes wrong: one rule a file, each with the examples that are its tests."""

from __future__ import annotations

from dsv4doctor.rules import (
    flag_not_consulted,
    layer_raises,
    layer_unknown,
    method_for_other_format,
    moe_draft_sm100_only,
    moe_main_sm100_only,
    stored_quant_mismatch,
    swiglu_limit_dropped,
)

MODULES = (
    moe_main_sm100_only,
    moe_draft_sm100_only,
    flag_not_consulted,
    stored_quant_mismatch,
    layer_raises,
    layer_unknown,
    swiglu_limit_dropped,
    method_for_other_format,
)
"""Every rule's module, in the order of the report: a RULE and its EXAMPLES each."""

RULES = tuple(module.RULE for module in MODULES)
