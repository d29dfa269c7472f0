"""Builds trace requests for the tests; imported by test files."""

import shutil
import sys
from pathlib import Path

from dsv4doctor.facts.checkpoint import read_checkpoint
from dsv4doctor.models import Arch, Launch, SglangTree, Trace
from dsv4doctor.trace.request import TraceRequest

EAGLE = (
    *("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "1"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "2"),
)
BOTH_TRITON = (
    *("--moe-runner-backend", "triton"),
    *("--speculative-moe-runner-backend", "triton"),
)
SM_120 = Arch(12, 0)


def request(
    tree: SglangTree,
    model: Path,
    flags: tuple[str, ...] = EAGLE,
    arch: Arch = SM_120,
    environment: dict[str, str] | None = None,
    **options: object,
) -> TraceRequest:
    """A launch of `model` on four GPUs, in an empty environment."""
    launch = Launch(
        source="command line",
        line=None,
        environment=environment or {},
        model=str(model),
        flags=("--tp", "4", *flags),
    )
    return TraceRequest(
        tree=tree,
        interpreter=Path(sys.executable),
        arch=arch,
        checkpoint=read_checkpoint(model),
        model_path=model,
        launch=launch,
        environment={},
        **options,  # type: ignore[arg-type]
    )


def traced(outcome: object) -> Trace:
    """The outcome as a Trace, or a failure that says what it was."""
    assert isinstance(outcome, Trace), f"{type(outcome).__name__}: {outcome}"
    return outcome


def changed_tree(tree: SglangTree, target: Path, file: str, appended: str) -> SglangTree:
    """A copy of a real tree with a few lines appended to one of its files."""
    shutil.copytree(tree.root, target, symlinks=True)
    path = target / "sglang" / file
    path.parent.chmod(0o755)
    path.chmod(0o644)
    path.write_text(path.read_text(encoding="utf-8") + "\n" + appended, encoding="utf-8")
    return SglangTree(str(target), tree.version, "folder")
