"""A user without a home folder, as of a container that is started with a bare user id."""

import pwd
from pathlib import Path

import pytest

from dsv4doctor import cli
from dsv4doctor.errors import UndeterminedError, UsageError
from dsv4doctor.facts.hub import hub_cache, resolve_model
from dsv4doctor.kernels import stamps
from dsv4doctor.state import state_folder
from dsv4doctor.wheels import default_cache

GPU = stamps.Platform("GPU", "12.0", "1", "2", "3")


@pytest.fixture(autouse=True)
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(number: int) -> None:
        raise KeyError(number)

    for name in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "DSV4DOCTOR_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("DSV4DOCTOR_STATE", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)


def test_folders_of_ours_have_to_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder, variable in ((default_cache, "DSV4DOCTOR_CACHE"), (state_folder, "STATE")):
        with pytest.raises(UsageError, match="no home folder") as refused:
            folder()
        assert variable in (refused.value.hint or "")
    assert cli.run(["fix", "--status", "--sglang", str(tmp_path)]) == 2
    assert "Set HOME, or DSV4DOCTOR_STATE to a folder" in capsys.readouterr().err
    monkeypatch.setenv("DSV4DOCTOR_STATE", str(tmp_path))
    assert state_folder() == tmp_path


def test_a_home_that_there_is_not_is_no_folder() -> None:
    assert hub_cache({}) == Path("~/.cache/huggingface/hub")
    for model in ("org/name", "~/model"):
        with pytest.raises(UsageError):
            resolve_model(model, {})


def test_a_server_that_asks_for_a_stamp_hears_why_there_is_none() -> None:
    said = stamps.stale("indexer_logits", GPU)
    assert said is not None
    assert "DSV4DOCTOR_STATE" in said


def test_a_stamp_that_cannot_be_taken_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4DOCTOR_STATE", str(tmp_path))
    path = stamps.path_of("indexer_logits", GPU)
    stamps.remove("indexer_logits", GPU)
    path.mkdir(parents=True)
    with pytest.raises(UndeterminedError, match="cannot be written"):
        stamps.remove("indexer_logits", GPU)
    monkeypatch.setenv("DSV4DOCTOR_STATE", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    stamps.remove("indexer_logits", GPU)
