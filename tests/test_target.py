"""From options to one launch: which GPU, model, interpreter and SGLang are meant."""

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dsv4doctor import fix_cli, target
from dsv4doctor.asked import Options
from dsv4doctor.commands import doctor_command
from dsv4doctor.errors import UsageError
from dsv4doctor.facts.snapshot import redacted_launch, text_of
from dsv4doctor.flags import flag_value, written_out
from dsv4doctor.models import ARCHS, Arch, Gpu, GpuFacts, Package, Role, Said, SglangTree
from dsv4doctor.rules import samples
from dsv4doctor.rules.common import backend_flags
from dsv4doctor.server_config import flags_of
from dsv4doctor.target import Target, resolve

_PRO = Gpu(0, "RTX PRO 6000", ARCHS["sm_120"], 96 << 30)
_B200 = Gpu(1, "B200", ARCHS["sm_100"], 180 << 30)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The smallest folder that is an SGLang with DeepSeek-V4."""
    models = tmp_path / "tree" / "sglang" / "srt" / "models"
    models.mkdir(parents=True)
    (models / "deepseek_v4.py").touch()
    (models.parent.parent / "version.py").write_text('__version__ = "0.5.14"\n')
    return tmp_path / "tree"


@pytest.fixture
def look(
    checkpoint: Callable[..., Path],
    tree: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Target]:
    """`look(gpus, **options)`: the target on a machine with those GPUs."""
    monkeypatch.setenv("DSV4DOCTOR_CACHE", str(tmp_path / "cache"))
    model = str(checkpoint("nvidia__DeepSeek-V4-Flash-NVFP4", experts=2))

    def resolved(gpus: tuple[Gpu, ...] = (_PRO,), **options: object) -> Target:
        monkeypatch.setattr(target, "read_gpus", lambda: GpuFacts(gpus, "580.1"))
        given: dict[str, object] = {"model": model, "sglang": str(tree), **options}
        return resolve(Options(**given))  # type: ignore[arg-type]

    return resolved


def test_the_driver_says_which_gpu(look: Callable[..., Target]) -> None:
    found = look((_PRO, _PRO))
    assert (found.arch, found.arch_source) == (ARCHS["sm_120"], "NVML")
    assert (found.gpu, found.gpu_count) == (_PRO, 2)
    assert found.notes == ()


def test_a_release_unpacked_over_another_is_said(look: Callable[..., Target], tree: Path) -> None:
    for version in ("0.5.16", "0.5.14", "0.5.12"):
        folder = tree / f"sglang-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: sglang\nVersion: {version}\n")
    found = look()
    assert found.tree.version == "0.5.14"
    (note,) = found.notes
    assert "(0.5.12, 0.5.14, 0.5.16): its code is of 0.5.14" in note


def test_arch_is_taken_as_said(look: Callable[..., Target]) -> None:
    other = look((_PRO,), arch="sm_100")
    assert (other.arch, other.arch_source, other.gpu) == (ARCHS["sm_100"], "--arch", None)
    assert look((_PRO,), arch="sm_120").gpu == _PRO


def test_gpus_of_several_kinds_are_said(
    look: Callable[..., Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = look((_PRO, _B200))
    assert first.arch == ARCHS["sm_120"]
    (note,) = first.notes
    assert "B200 (sm_100), RTX PRO 6000 (sm_120)" in note
    assert "GPU 0 is used" in note
    assert look((_PRO, _B200), env=("CUDA_VISIBLE_DEVICES=1",)).arch == ARCHS["sm_100"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")  # of the shell that the server starts from
    assert look((_PRO, _B200)).arch == ARCHS["sm_100"]


def test_the_gpu_of_a_container_is_one_that_it_is_given(
    look: Callable[..., Target], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    script = tmp_path / "serve.sh"

    def arch(option: str) -> Arch:
        server = "python -m sglang.launch_server --model-path /m"
        script.write_text(f"docker run {option} image {server}\n")
        return look((_PRO, _B200), launch=script).arch

    assert arch("--gpus all") == ARCHS["sm_120"]
    assert arch("--gpus device=1") == ARCHS["sm_100"]
    assert arch("-e CUDA_VISIBLE_DEVICES=1") == ARCHS["sm_100"]


def test_no_gpu_needs_arch(look: Callable[..., Target]) -> None:
    with pytest.raises(UsageError, match="no GPU on this machine"):
        look(())
    assert look((), arch="sm_121").arch == ARCHS["sm_121"]


def test_a_gpu_that_nothing_is_traced_for_needs_arch(look: Callable[..., Target]) -> None:
    older = Gpu(0, "L40S", Arch(8, 9), 48 << 30)
    with pytest.raises(UsageError, match="L40S is sm_89") as raised:
        look((older,))
    assert "--arch sm_90|" in str(raised.value.hint)
    assert look((older,), arch="sm_120").gpu is None


def test_model_on_the_command_line_replaces_the_scripts(
    look: Callable[..., Target], tmp_path: Path
) -> None:
    script = tmp_path / "serve.sh"
    script.write_text(
        "export SGLANG_A=1\n/no/such/venv/bin/python -m sglang.launch_server"
        " --model-path /on/the/server --tp 4\n"
    )
    found = look(launch=script, env=("SGLANG_B=2",))
    assert found.launch.model == str(found.model_path)
    assert found.launch.flags == ("--tp", "4")
    assert found.launch.environment == {"SGLANG_A": "1", "SGLANG_B": "2"}
    assert found.interpreter == Path(sys.executable)
    assert found.notes == (
        f"/no/such/venv/bin/python, the Python of {script}, is not on this machine",
    )


def test_python_of_the_script_is_taken_when_it_is_here(
    look: Callable[..., Target], tmp_path: Path
) -> None:
    script = tmp_path / "serve.sh"
    script.write_text(f"{sys.executable} -m sglang.launch_server --model-path x\n")
    assert look(launch=script).interpreter == Path(sys.executable)
    assert look(launch=script).notes == ()


def test_snapshot_supplies_what_is_not_said(
    look: Callable[..., Target], tmp_path: Path, tree: Path
) -> None:
    here = look((_PRO,), flags=("--tp", "4", "--api-key", "sk-1"))
    assert here.launch.flags[-1] == "sk-1"
    file = tmp_path / "box.json"
    plain = json.loads(text_of(here.snapshot))
    plain["checkpoint"]["path"] = "/elsewhere"
    file.write_text(json.dumps(plain))
    there = look((_B200,), snapshot=file, model=None, sglang=None)
    assert (there.arch, there.arch_source) == (ARCHS["sm_120"], "snapshot")
    assert there.launch.flags == ("--tp", "4", "--api-key", "[redacted]")
    assert there.checkpoint.path == "/elsewhere"
    assert json.loads((there.model_path / "config.json").read_text()) == here.checkpoint.config
    # The release is fetched: what lies at a path that the file names is not imported.
    assert there.tree.version == here.tree.version
    assert there.tree.root != str(tree)
    again = look((_B200,), snapshot=file, model=None, sglang=None)
    assert again.model_path == there.model_path  # so that the trace's cache key stays


def test_a_script_with_another_model_than_the_snapshots(
    look: Callable[..., Target], checkpoint: Callable[..., Path], tmp_path: Path, tree: Path
) -> None:
    """The script's is looked at, and never the snapshot's in its place."""
    file, script = tmp_path / "box.json", tmp_path / "serve.sh"
    file.write_text(text_of(look((_PRO,)).snapshot))
    other = checkpoint("deepseek-ai__DeepSeek-V4-Flash", experts=2)

    def read(model: str) -> Target:
        script.write_text(f"python -m sglang.launch_server --model-path {model}\n")
        return look((_PRO,), snapshot=file, launch=script, model=None)

    assert read(str(other)).checkpoint.path == str(other)
    with pytest.raises(UsageError) as raised:
        read("/models/other")
    for said in ("serve.sh: /models/other: no such folder", "box.json is of another model"):
        assert said in raised.value.message
    # In another folder, or without a name: the snapshot's.
    name = look((_PRO,)).checkpoint.name
    for same in (f"/models/{name}", '"$UNSET_HERE"'):
        assert read(same).checkpoint.path == look((_PRO,)).checkpoint.path
    assert look((_PRO,), snapshot=file, model=None, flags=("--tp", "4")).checkpoint.name == name


_OTHERS = ("--tp", "2", "--moe-runner-backend", "marlin")


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        pytest.param({}, None, id="all of the snapshot"),
        pytest.param({}, _OTHERS, id="its launch with other flags"),
        pytest.param({"arch": "sm_121", "env": ("SGLANG_B=x y",)}, None, id="another GPU"),
        pytest.param({"arch": "sm_121", "env": ("SGLANG_B=x y",)}, _OTHERS, id="and other flags"),
        pytest.param({"launch": "serve.sh"}, None, id="a script of this machine"),
        pytest.param({"flags": _OTHERS}, None, id="flags"),
        pytest.param({"model": True}, None, id="another model"),
        pytest.param({"model": True, "launch": "serve.sh"}, None, id="for a script"),
        pytest.param({"model": True, "launch": "serve.sh", "snapshot": None}, None, id="at home"),
        pytest.param({"python": True}, None, id="another Python"),
    ],
)
def test_a_command_that_is_printed_finds_the_same_launch(
    look: Callable[..., Target],
    tmp_path: Path,
    options: dict[str, object],
    changed: tuple[str, ...] | None,
) -> None:
    script = tmp_path / "serve.sh"
    here = look()
    served = f"/on/it/{here.checkpoint.name} --tp 4"
    script.write_text(f"export SGLANG_A=1\npython -m sglang.launch_server --model-path {served}\n")
    box = look((_PRO,), launch=script)
    plain = json.loads(text_of(box.snapshot))
    plain["stack"]["interpreter"] = "/of/the/box/python"
    (tmp_path / "a box.json").write_text(json.dumps(plain))
    values: dict[str, object] = {"model": None, "snapshot": tmp_path / "a box.json", **options}
    known = {"model": here.launch.model, "launch": script, "python": sys.executable}
    values |= {name: value for name, value in known.items() if values.get(name)}
    asked = look((_B200,), **values)
    facts = replace(samples.facts("sm_120", []), arch=asked.arch, arch_source=asked.arch_source)
    facts = replace(facts, snapshot=asked.snapshot, said=asked.said)
    assert facts.trace is not None
    facts = replace(facts, trace=replace(facts.trace, sglang=asked.tree))
    if changed is not None:
        launch = replace(asked.launch, flags=changed)
        facts = replace(facts, snapshot=replace(asked.snapshot, launch=launch))
    words = shlex.split(doctor_command(facts, "fix", "--only", "FIX101") or "")
    assert words[:4] == ["dsv4doctor", "fix", "--only", "FIX101"]
    assert "/of/the/box/python" not in words
    context = fix_cli.fix_command.make_context("fix", words[2:], obj={})
    found = resolve(fix_cli._said(context, context.params))
    assert found.launch.flags == (asked.launch.flags if changed is None else changed)
    assert found.launch.environment == asked.launch.environment
    for name in ("arch", "arch_source", "tree", "checkpoint", "interpreter", "gpu"):
        assert getattr(found, name) == getattr(asked, name), name


def test_no_command_where_the_snapshots_config_file_is_needed(
    look: Callable[..., Target], tmp_path: Path
) -> None:
    launch = replace(look(flags=("--config", "a.yaml")).launch, configured=("--tp", "4"))
    said = Said(snapshot="box.json", saved_flags=launch.flags)
    facts = replace(samples.facts("sm_120", []), said=said)
    for flags, is_none in ((launch.flags, False), (_OTHERS, True)):
        snapshot = replace(facts.snapshot, launch=replace(launch, flags=flags))
        assert (doctor_command(replace(facts, snapshot=snapshot), "fix") is None) is is_none


def test_the_revision_of_a_launch_is_meant(
    look: Callable[..., Target], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hub" / "models--org--model").mkdir(parents=True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(UsageError, match="models--org--model/refs/nightly"):
        look(model="org/model", flags=("--tp", "4", "--revision=nightly"))


def test_a_snapshot_that_was_edited_is_another_checkpoint(
    look: Callable[..., Target], tmp_path: Path
) -> None:
    file = tmp_path / "box.json"
    plain = json.loads(text_of(look((_PRO,)).snapshot))
    folders = []
    for layers in (43, 20):
        plain["checkpoint"]["config"]["num_hidden_layers"] = layers
        file.write_text(json.dumps(plain))
        folders.append(look((_PRO,), snapshot=file, model=None).model_path)
        config = json.loads((folders[-1] / "config.json").read_text())
        assert config["num_hidden_layers"] == layers
    assert folders[0] != folders[1]  # the key of a kept trace


def test_a_snapshots_packages_are_held_to_the_release_that_is_asked_for(
    look: Callable[..., Target], tmp_path: Path, tree: Path
) -> None:
    file = tmp_path / "box.json"
    plain = json.loads(text_of(look((_PRO,)).snapshot))
    flashinfer = {"name": "flashinfer-python", "version": "0.6.12"}
    plain["stack"]["packages"] = [{**flashinfer, "required": "==0.6.12", "satisfied": True}]
    file.write_text(json.dumps(plain))
    (tree / "sglang" / "version.py").write_text('__version__ = "0.5.99"\n')
    (tree / "pyproject.toml").write_text('[project]\ndependencies = ["flashinfer_python==0.9"]\n')
    newer = look((_PRO,), snapshot=file, model=None).snapshot.stack
    assert newer is not None
    assert newer.packages == (
        Package("sglang", "0.5.99", None, None),
        Package("flashinfer-python", "0.6.12", "==0.9", False),
    )


def test_another_release_at_the_snapshots_path_is_not_taken(
    look: Callable[..., Target], tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "box.json"
    file.write_text(text_of(look((_PRO,)).snapshot))
    (tree / "sglang" / "version.py").write_text('__version__ = "0.5.99"\n')
    asked: list[str] = []

    def fetch(version: str, *_: object) -> SglangTree:
        asked.append(version)
        return SglangTree(str(tree), version, "wheel")

    monkeypatch.setattr("dsv4doctor.asked_sglang.fetch_tree", fetch)
    assert look((_PRO,), snapshot=file, model=None, sglang=None).tree.version == "0.5.14"
    assert asked == ["0.5.14"]


@pytest.mark.parametrize("text", ["FOO", "=1", "A B=1", "1A=2"])
def test_bad_env(look: Callable[..., Target], text: str) -> None:
    with pytest.raises(UsageError, match="not KEY=VALUE"):
        look(env=(text,))


@pytest.mark.parametrize(
    "line", ["model-path: {}", "'model_path':  \"{}\"  # ours", "model: {}", "x: &a {}\nmodel: *a"]
)
def test_the_model_of_sglangs_own_config_file(
    line: str, look: Callable[..., Target], tmp_path: Path
) -> None:
    """SGLang's flags count more than the file, and the file more than nothing."""
    model = look().launch.model
    config, script = tmp_path / "srv.yaml", tmp_path / "serve.sh"
    config.write_text(f"tp-size: 2\n{line.format(model)}\n")
    script.write_text(f"python -m sglang.launch_server --config {config}\n")
    found = look(model=None, launch=script)
    assert (found.launch.model, found.model_path) == (model, Path(str(model)))
    assert f"the model is what --config {config} names" in found.notes
    assert look(model=None, flags=("--config", str(config))).launch.model == model
    other = f"python -m sglang.launch_server --config {config} --model-path {tmp_path}/other\n"
    script.write_text(other)
    with pytest.raises(UsageError, match="/other"):
        look(model=None, launch=script)
    config.write_text("tp-size: 2\n")
    script.write_text(f"python -m sglang.launch_server --config {config}\n")
    with pytest.raises(UsageError, match=r"names no model, nor does --config \S*srv\.yaml"):
        look(model=None, launch=script)


def test_the_flags_of_sglangs_own_config_file(look: Callable[..., Target], tmp_path: Path) -> None:
    """A rule sees what the file sets as it sees a flag, which counts more."""
    config = tmp_path / "srv.yaml"
    config.write_text(
        "moe-runner-backend: triton\ntp_size: 8\nenable-metrics: true\nenable-eplb: false\n"
        "api-key: hidden\nnuma-node: [0, 1]\njson-model-override-args: {num_hidden_layers: 4}\n"
    )
    launch = look(flags=("--config", str(config), "--tp-size", "4")).launch
    assert launch.flags == ("--config", str(config), "--tp-size", "4")
    assert launch.configured == (
        *("--moe-runner-backend", "triton", "--tp-size", "8", "--enable-metrics"),
        *("--api-key", "hidden", "--numa-node", "0", "1"),
        *("--json-model-override-args", '{"num_hidden_layers": 4}'),
    )
    assert flag_value(launch.all_flags, "--tp-size") == "4"
    assert written_out(launch) == (*launch.configured, "--tp-size", "4")
    assert "hidden" not in redacted_launch(launch).configured
    scene = samples.facts("sm_120", list(samples.MAIN_CUTLASS))
    facts = replace(scene, snapshot=replace(scene.snapshot, launch=launch))
    assert backend_flags(facts, Role.MAIN) == {"--moe-runner-backend": "triton"}


@pytest.mark.parametrize("text", ["[1, 2", "- a\n- b\n", "{" * 3000, "", "a: !!python/name:os.x\n"])
def test_what_is_no_configuration_is_left_to_sglang(text: str, tmp_path: Path) -> None:
    path = tmp_path / "srv.yaml"
    path.write_text(text)
    assert flags_of(path) == ()


def test_why_a_scripts_model_is_not_known(look: Callable[..., Target], tmp_path: Path) -> None:
    script = tmp_path / "serve.sh"
    script.write_text(
        '\npython -m sglang.launch_server --model-path "${MODEL:?}" --config a.yaml\n'
    )
    with pytest.raises(UsageError, match=r"serve\.sh:2: cannot know the model.*\$MODEL is not set"):
        look(model=None, launch=script)
