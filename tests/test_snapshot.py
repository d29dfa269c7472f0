"""Facts of a machine in a file: what is kept, what is hidden, what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dsv4doctor.cli import run
from dsv4doctor.errors import UsageError
from dsv4doctor.facts import snapshot
from dsv4doctor.facts.checkpoint import read_checkpoint
from dsv4doctor.models import ARCHS, Gpu, GpuFacts, HostFacts, Launch, Package, SglangTree, Stack

_GPU = Gpu(0, "RTX PRO 6000", ARCHS["sm_120"], 96 << 30)


def _launch(*flags: str, **environment: str) -> Launch:
    return Launch("serve.sh", 3, environment, "/models/x", flags, "/venv/bin/python", ("exec",))


def test_everything_comes_back_from_the_file(checkpoint, tmp_path: Path) -> None:
    taken = snapshot.take(
        gpu=GpuFacts((_GPU,), "580.1"),
        sglang=SglangTree("/venv/lib/site-packages", "0.5.14", "installed"),
        stack=Stack("/venv/bin/python", "3.11.9", (Package("torch", "2.11", "==2.11", True),)),
        checkpoint=read_checkpoint(checkpoint("nvidia__DeepSeek-V4-Flash-NVFP4", experts=2)),
        launch=_launch("--tp", "4", SGLANG_X="1"),
        environment={"NCCL_DEBUG": "INFO", "PATH": "/bin", "EDITOR": "vi"},
        host=HostFacts("6.17.0", memory_nodes=(0, 1), pci_roots={"00000000:01:00.0": "pci0000:00"}),
    )
    assert taken.environment == {"NCCL_DEBUG": "INFO"}
    file = tmp_path / "box.json"
    file.write_text(snapshot.text_of(taken), encoding="utf-8")
    assert snapshot.read_snapshot(file) == taken
    plain = json.loads(file.read_text(encoding="utf-8"))
    del plain["host"]  # as an older dsv4doctor writes it
    file.write_text(json.dumps(plain), encoding="utf-8")
    assert snapshot.read_snapshot(file) == replace(taken, host=None)


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("HF_TOKEN", True),
        ("SGLANG_API_KEY", True),
        ("HUGGINGFACE_HUB_TOKEN", True),
        ("NCCL_SECRET", True),
        ("SGLANG_ADMIN_PASSWORD", True),
        ("AWS_CREDENTIALS", True),
        ("SGLANG_MYTOKEN", True),
        ("--ssl-keyfile-password", True),
        ("TOKENIZERS_PARALLELISM", False),
        ("SGLANG_MAX_TOKENS", False),
        ("--max-total-tokens", False),
        ("--tokenizer-path", False),
        ("--speculative-num-draft-tokens", False),
        ("CUDA_VISIBLE_DEVICES", False),
    ],
)
def test_which_names_are_secret(name: str, secret: bool) -> None:
    assert snapshot.looks_secret(name) is secret


@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        (("--api-key", "sk-1", "--tp", "4"), ("--api-key", "[redacted]", "--tp", "4")),
        (("--api-key=sk-1",), ("--api-key=[redacted]",)),
        (("--api-k", "sk-1"), ("--api-k", "[redacted]")),
        (("--admin-api-key", "sk-1"), ("--admin-api-key", "[redacted]")),
        (("--ssl-keyfile-password", "sk-1"), ("--ssl-keyfile-password", "[redacted]")),
        (
            ("--model-loader-extra-config", '{"api_key": "sk-1", "n": 2}'),
            ("--model-loader-extra-config", '{"api_key": "[redacted]", "n": 2}'),
        ),
        (("--proxy", "http://me:sk-1@host/x"), ("--proxy", "http://host/x")),
        (("--max-total-tokens", "100"), ("--max-total-tokens", "100")),
    ],
)
def test_flags_keep_everything_but_secrets(flags: tuple[str, ...], kept: tuple[str, ...]) -> None:
    assert snapshot.redacted_flags(flags) == kept


def test_no_secret_reaches_the_file() -> None:
    taken = snapshot.take(
        gpu=GpuFacts(()),
        sglang=None,
        stack=None,
        checkpoint=None,
        launch=_launch("--api-key", "sk-1", HF_TOKEN="sk-1", MY_PASSWORD="sk-1"),
        environment={"HF_TOKEN": "sk-1", "HF_ENDPOINT": "https://u:sk-1@hub", "OTHER": "sk-1"},
    )
    assert "sk-1" not in snapshot.text_of(taken)
    assert taken.environment == {"HF_ENDPOINT": "https://hub", "HF_TOKEN": "[redacted]"}
    assert snapshot.usable_environment(taken.environment) == {"HF_ENDPOINT": "https://hub"}


def _minimal() -> dict[str, object]:
    taken = snapshot.take(
        gpu=GpuFacts(()), sglang=None, stack=None, checkpoint=None, launch=None, environment={}
    )
    plain: dict[str, object] = json.loads(snapshot.text_of(taken))
    return plain


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("[]", "not a snapshot"),
        ("{}", "not a snapshot"),
        (json.dumps({"schema": "dsv4doctor-snapshot/99"}), "this dsv4doctor reads"),
        (json.dumps({**_minimal(), "gpu": 3}), "not what dsv4doctor writes"),
        (json.dumps({**_minimal(), "created": 3}), r"\(created: invalid value\)"),
        (json.dumps({"schema": snapshot.SCHEMA}), "not what dsv4doctor writes"),
        (f'{{"environment": {"[" * 200}{"]" * 200}}}', "nested too deeply"),
    ],
    ids=[
        *("empty", "truncated", "deep", "list", "object", "newer"),
        *("wrong-type", "number-for-text", "no-fields", "some-levels"),
    ],
)
def test_bad_files_are_refused_by_name(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "box.json"
    file.write_text(content)
    with pytest.raises(UsageError, match=said) as caught:
        snapshot.read_snapshot(file)
    assert str(file) in caught.value.message


def test_absent_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        snapshot.read_snapshot(tmp_path / "absent.json")


def test_command_writes_what_is_there(
    checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DSV4DOCTOR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", "sk-1")
    folder = checkpoint("nvidia__DeepSeek-V4-Flash-NVFP4", experts=2)
    file = tmp_path / "box.json"
    code = run(["snapshot", "-o", str(file), str(folder), "--", "--tp", "4", "--api-key", "sk-1"])
    assert code == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    taken = snapshot.read_snapshot(file)
    assert taken.checkpoint is not None
    assert replace(taken.checkpoint, path="") == replace(read_checkpoint(folder), path="")
    assert taken.launch is not None
    assert taken.launch.flags == ("--tp", "4", "--api-key", "[redacted]")
    assert taken.stack is not None
    assert "sk-1" not in file.read_text()
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == ["box.json"]


def test_command_writes_nothing_when_a_named_file_is_bad(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "box.json"
    assert run(["snapshot", "-o", str(file), str(tmp_path / "absent")]) == 2
    assert not file.exists()
    assert "absent" in capsys.readouterr().err


def test_a_snapshot_does_not_say_what_python_imports() -> None:
    """PYTHONPATH and preloaded libraries of another machine, or of whoever wrote the file."""
    variables = {"PYTHONPATH": "/elsewhere", "LD_PRELOAD": "/x.so", "NCCL_DEBUG": "INFO"}
    assert snapshot.usable_environment(variables) == {"NCCL_DEBUG": "INFO"}
