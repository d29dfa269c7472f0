"""What the rules about the hot paths say of a launch that a matrix would recommend.

A kernel that exists for a GPU can still be the wrong one for a launch: attention that reads
unwritten memory, a draft whose shape has no kernel.  `check` calls that an error, and so nothing
with it is recommended.
"""

from __future__ import annotations

from pathlib import Path

from dsv4doctor import __version__
from dsv4doctor.audit import run_rules
from dsv4doctor.facts.features import read_features
from dsv4doctor.facts.stack import against
from dsv4doctor.models import (
    Checkpoint,
    Facts,
    GpuFacts,
    Launch,
    Severity,
    SglangTree,
    Snapshot,
    Stack,
    Trace,
    TreeFeatures,
)
from dsv4doctor.rules import RULES

_HOT_PATHS = tuple(rule for rule in RULES if rule.id.startswith("DSV2"))


class Beside:
    """A release as the rules see it: what its sources have, and the packages around it."""

    def __init__(self, tree: SglangTree, stack: Stack | None) -> None:
        self.tree = tree
        self.stack: Stack = against(stack or Stack("python", "3.12", ()), tree)
        self.features: TreeFeatures = read_features(Path(tree.root))

    def error(
        self, trace: Trace, checkpoint: Checkpoint, launch: Launch, environment: dict[str, str]
    ) -> str | None:
        """The first error about a hot path, and the way out of it; None: there is none."""
        snapshot = Snapshot(
            tool_version=__version__,
            created="",
            gpu=GpuFacts(()),
            sglang=self.tree,
            stack=self.stack,
            checkpoint=checkpoint,
            launch=launch,
            environment=environment,
        )
        facts = Facts(snapshot, trace.arch, "--arch", trace, features=self.features)
        for result in run_rules(_HOT_PATHS, facts):
            for found in result.findings:
                if found.severity is Severity.ERROR:
                    way = f" {found.remedy.text}" if found.remedy else ""
                    return f"{found.rule}: {found.message}{way}".removesuffix(".")
        return None
