"""Parts of real SGLang trees, and fixes that always apply; imported by the tests of patching."""

import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dsv4doctor.audit import Settings
from dsv4doctor.fixes import ALL
from dsv4doctor.fixes.fix import Change, Choice, Fix, Outcome, Present, Sources
from dsv4doctor.models import Facts, Location, SglangTree
from dsv4doctor.patching.journal import Store
from dsv4doctor.patching.view import Asked
from dsv4doctor.patching.work import Job
from dsv4doctor.rules.samples import MAIN_CUTLASS, facts
from dsv4doctor.target import Target

RELEASES = tuple(f"0.5.{number}" for number in range(14, 24))
QUANT = "sglang/srt/layers/quantization/modelopt_quant.py"
FP8 = "sglang/srt/layers/quantization/fp8.py"
KV = "sglang/srt/layers/quantization/kv_cache.py"
FILES = (QUANT, FP8, KV)
FACTS = facts("sm_120", [*MAIN_CUTLASS])


def adds(name: str, *files: str) -> Fix:
    """A fix that adds a line with its name and the kernel to each of `files`."""

    def plan(sources: Sources, choice: Choice) -> Outcome:
        mark = f"# {name}:"
        if all(mark in sources[file] for file in files):
            return Present(Location(files[0], 1), "fixed upstream")
        changed = {
            file: f"{mark} {choice.kernel}\n{sources[file]}"
            for file in files
            if mark not in sources[file]
        }
        return Change(changed, (Location(files[0], 1),), "adds a line", choice.kernel)

    return Fix(
        id=name,
        title=f"a line that says {name}",
        rules=(),
        files=files,
        plan=plan,
        needed=lambda facts: "the test says so",
        changes=lambda layer: False,
        verify=lambda facts, trace: (),
        verified_by="nothing",
    )


ONE = adds("FIX901", QUANT, FP8)
TWO = adds("FIX902", QUANT, KV)
BOTH = (ONE, TWO)


def insisting(fixes: Iterable[Fix] = ALL) -> tuple[Fix, ...]:
    """The real fixes, as if every launch needed them and no layer said anything about it.

    The same question twice is answered from memory: their plans are pure and take a second.
    """
    return tuple(
        replace(
            fix,
            plan=_remembering(fix.plan),
            needed=lambda facts: "the test says so",
            changes=lambda layer: False,
            verify=lambda facts, trace: (),
        )
        for fix in fixes
    )


def _remembering(plan: Callable[[Sources, Choice], Outcome]) -> Callable[..., Outcome]:
    answers: dict[object, Outcome] = {}

    def answer(sources: Sources, choice: Choice) -> Outcome:
        question = (tuple(sorted(sources.items())), choice)
        if question not in answers:
            answers[question] = plan(sources, choice)
        return answers[question]

    return answer


def part_of(tree: SglangTree, target: Path, files: Iterable[str] = FILES) -> SglangTree:
    """The files of a real tree in `target`, its metadata and what makes it a tree with them."""
    root = Path(tree.root)
    needed = ("sglang/__init__.py", "sglang/version.py", "sglang/srt/models/deepseek_v4.py")
    for name in dict.fromkeys((*needed, *files)):
        if (root / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / name, target / name)
            (target / name).chmod(0o644)
    for metadata in root.glob("sglang-*.dist-info"):
        (target / metadata.name).mkdir()
        for file in ("METADATA", "RECORD"):
            shutil.copyfile(metadata / file, target / metadata.name / file)
    return SglangTree(str(target), tree.version, "folder")


def contents(root: Path) -> dict[str, tuple[bytes | str, int]]:
    """Every file below `root`: its bytes, or where it links to, and its mode."""
    return {
        path.relative_to(root).as_posix(): (
            path.readlink().as_posix() if path.is_symlink() else path.read_bytes(),
            path.lstat().st_mode,
        )
        for path in sorted(root.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


@dataclass(frozen=True)
class Recorded(Job):
    """A job whose traces were made before: the facts without the fixes, and with them."""

    before: Facts = FACTS
    after: Facts = FACTS
    traced: Callable[[], None] = lambda: None
    """Called at the second trace."""

    def facts(self, tree: SglangTree, files: Iterable[str] = ()) -> Facts:
        if not files:
            return self.before
        self.traced()
        return self.after


def job(tree: SglangTree, state: Path, fixes: Sequence[Fix] = BOTH, **options: object) -> Recorded:
    """`fixes` on `tree` with a journal in `state`; `options` are Asked's and Recorded's."""
    own = {name: options.pop(name) for name in ("before", "after", "traced") if name in options}
    target = Target(
        snapshot=FACTS.snapshot,
        arch=FACTS.arch,
        arch_source="--arch",
        tree=tree,
        interpreter=Path("python"),
        checkpoint=None,  # type: ignore[arg-type]
        model_path=Path(),
        launch=None,  # type: ignore[arg-type]
        environment={},
    )
    asked = Asked(**options)  # type: ignore[arg-type]
    return Recorded(Store(state, tree), fixes, target, asked, Settings(), **own)  # type: ignore[arg-type]
