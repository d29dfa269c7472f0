"""A kernel serves only where and with what it was verified."""

import shutil
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from dsv4doctor.errors import UndeterminedError, UsageError
from dsv4doctor.kernels import catalog, stamps
from dsv4doctor.kernels.registry import ARCHS, Check, KernelMeta
from dsv4doctor.kernels.verify import (
    Checked,
    UnverifiedKernelError,
    record,
    require_stamp,
    run_checks,
)
from dsv4doctor.state import state_folder

TINY = Path(__file__).parent / "data" / "tiny_kernels.py"
HERE = stamps.Platform("NVIDIA RTX PRO 6000", "12.0", "580.65", "2.9.1", "3.5.1")
GOOD = (Checked("indexer_logits", "one", 0.001, 0.01, 0.1),)


class Kernel:
    """A kernel file with checks of one's choosing."""

    META = KernelMeta("fake", "A fake", (), 0.01)

    def __init__(self, *checks: Check) -> None:
        self._checks = checks

    def compile_cases(self, arch: str) -> tuple[()]:
        return ()

    def bench_cases(self, device: str) -> tuple[()]:
        return ()

    def checks(self, device: str) -> tuple[Check, ...]:
        return self._checks


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(stamps.STATE_VARIABLE, str(tmp_path / "state"))
    monkeypatch.delenv(stamps.UNVERIFIED_VARIABLE, raising=False)


def raises(device: str) -> float:
    raise RuntimeError("some source line\nout of memory")


@pytest.mark.parametrize(
    ("error", "passed"),
    [(0.0, True), (0.01, True), (0.0101, False), (float("nan"), False), (float("inf"), False)],
)
def test_the_bar(error: float, passed: bool) -> None:
    (result,) = run_checks("fake", Kernel(Check("c", 0.01, lambda device: error)), "cpu")
    assert result.passed is passed


def test_a_check_that_raises_has_failed_and_the_others_still_run() -> None:
    first, second = run_checks(
        "fake", Kernel(Check("a", 0.01, raises), Check("b", 0.01, lambda d: 0.0)), "cpu"
    )
    assert (first.passed, first.failure) == (False, "RuntimeError: out of memory")
    assert second.passed


def test_no_checks_is_no_pass() -> None:
    slow = Check("slow", 0.01, lambda device: 0.0, quick=False)
    assert [r.passed for r in run_checks("fake", Kernel(), "cpu")] == [False]
    assert [r.passed for r in run_checks("fake", Kernel(slow), "cpu", quick=True)] == [False]
    assert [r.check for r in run_checks("fake", Kernel(slow), "cpu")] == ["slow"]


def test_a_stamp_lets_a_kernel_serve() -> None:
    with pytest.raises(UnverifiedKernelError, match="kernels verify --only indexer_logits"):
        require_stamp("indexer_logits", platform=HERE)
    path = record("indexer_logits", GOOD, HERE)
    assert path is not None
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    require_stamp("indexer_logits", platform=HERE)
    with pytest.raises(UnverifiedKernelError, match="never verified"):
        require_stamp("sparse_mla_decode", platform=HERE)


@pytest.mark.parametrize(
    "change", [{"driver": "590.1"}, {"torch": "2.10.0"}, {"triton": "3.6.0"}, {"gpu": "other"}]
)
def test_a_stamp_of_another_stack_does_not_count(change: dict[str, str]) -> None:
    record("indexer_logits", GOOD, HERE)
    with pytest.raises(UnverifiedKernelError, match=r"was (never )?verified"):
        require_stamp("indexer_logits", platform=replace(HERE, **change))


def test_a_failed_check_removes_the_old_stamp() -> None:
    record("indexer_logits", GOOD, HERE)
    assert record("indexer_logits", (*GOOD, replace(GOOD[0], error=0.5)), HERE) is None
    with pytest.raises(UnverifiedKernelError):
        require_stamp("indexer_logits", platform=HERE)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"key": 3}', '{"key": {"gpu"'])
def test_a_damaged_stamp_does_not_count(text: str) -> None:
    path = record("indexer_logits", GOOD, HERE)
    assert path is not None
    path.write_text(text)
    with pytest.raises(UnverifiedKernelError, match="cannot be read"):
        require_stamp("indexer_logits", platform=HERE)


def test_unverified_only_when_told_to_and_loudly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(stamps.UNVERIFIED_VARIABLE, "1")
    with pytest.warns(RuntimeWarning, match="indexer_logits was never verified"):
        require_stamp("indexer_logits", platform=HERE)


def test_a_state_folder_that_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(stamps.STATE_VARIABLE, str(tmp_path / "file"))
    with pytest.raises(UndeterminedError, match="cannot be written") as raised:
        record("indexer_logits", GOOD, HERE)
    assert stamps.STATE_VARIABLE in str(raised.value.hint)


def test_stamps_and_journals_lie_in_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(stamps.STATE_VARIABLE, "~/kept")
    path = record("indexer_logits", GOOD, HERE)
    assert path is not None
    assert path.is_relative_to(tmp_path / "kept")
    assert state_folder() == tmp_path / "kept"


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A small kernels folder: op -> shared -> deep; adapters/op; unrelated; registry."""
    folder = tmp_path / "kernels"
    (folder / "adapters").mkdir(parents=True)
    (folder / "reference").mkdir()
    shutil.copy(TINY, folder / "op.py")
    with (folder / "op.py").open("a") as file:
        file.write("\ndef late():\n    from dsv4doctor.kernels import shared\n    return shared\n")
    (folder / "shared.py").write_text("from dsv4doctor.kernels.reference.deep import x\n")
    (folder / "reference" / "deep.py").write_text("x = 1\n")
    (folder / "adapters" / "op.py").write_text("import dsv4doctor.kernels.op\n")
    for other in ("unrelated.py", "registry.py"):
        (folder / other).write_text("y = 1\n")
    return folder


def test_the_source_of_a_kernel_is_what_it_reaches(sources: Path) -> None:
    files = {p.relative_to(sources).as_posix() for p in catalog.source_files("op", sources)}
    assert files == {"op.py", "shared.py", "reference/deep.py", "adapters/op.py"}


@pytest.mark.parametrize(
    ("file", "counts"),
    [("op.py", True), ("shared.py", True), ("reference/deep.py", True), ("unrelated.py", False)],
)
def test_a_changed_source_makes_the_stamp_stale(sources: Path, file: str, counts: bool) -> None:
    record("op", GOOD, HERE, folder=sources)
    assert stamps.stale("op", HERE, sources) is None
    path = sources / file
    path.write_text(path.read_text() + "\n")
    expected = "was verified before the kernel's source changed" if counts else None
    assert stamps.stale("op", HERE, sources) == expected


def test_meta_is_read_without_importing(sources: Path) -> None:
    meta = catalog.meta("op", sources)
    assert meta == KernelMeta(
        "tiny_kernels", "A matrix product over one block", ("torch.mm",), 0.01, ARCHS
    )
    (sources / "op.py").write_text("META = KernelMeta(name=compute())\n")
    with pytest.raises(UndeterminedError, match=r"op\.py does not describe itself"):
        catalog.meta("op", sources)


def test_the_choice_of_kernels() -> None:
    assert catalog.select(["indexer_logits"]) == ("indexer_logits",)
    assert len(catalog.select([])) == len(set(catalog.select([]))) > 3
    with pytest.raises(UsageError, match="no-such"):
        catalog.select(["no-such"])


def test_stamps_are_for_this_user(tmp_path: Path) -> None:
    path = record("indexer_logits", GOOD, HERE)
    assert path is not None
    assert path.is_relative_to(tmp_path / "state")
    assert not stat.S_IMODE(path.stat().st_mode) & 0o022
