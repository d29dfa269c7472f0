"""SGLang's own check of the resolved arguments, which a server runs before it loads anything."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tracing import EAGLE, changed_tree, request, traced

from dsv4doctor.cli import run
from dsv4doctor.models import Role, SglangTree, Trace
from dsv4doctor.trace.session import trace_launch, trace_launches

pytestmark = pytest.mark.wheels

Tree = Callable[[str], SglangTree]
Checkpoint = Callable[..., Path]

TWO_NODES = ("--nnodes", "2", "--dist-init-addr", "10.0.0.1:5000")
REFUSED = {
    ("--pp-size", "2", *EAGLE): {
        "0.5.14": "Pipeline parallelism is not compatible with overlap schedule, speculative",
        "0.5.23": "PP + speculative decoding (MTP) is only supported on prefill nodes",
    },
    ("--nnodes", "3", "--dist-init-addr", "10.0.0.1:5000"): {
        "0.5.14": "tp_size must be divisible by number of nodes",
        "0.5.23": "tp_size must be divisible by number of nodes",
    },
    ("--dp-size", "2", *TWO_NODES): {
        "0.5.14": "multi-node data parallel is not supported unless dp attention!",
        "0.5.23": "multi-node data-parallel replicas are not supported",
    },
    ("--base-gpu-id", "-1"): {
        "0.5.14": "base_gpu_id must be non-negative",
        "0.5.23": "base_gpu_id must be non-negative",
    },
    ("--gpu-id-step", "0"): {
        "0.5.14": "gpu_id_step must be positive",
        "0.5.23": "gpu_id_step must be positive",
    },
}
"""Flags -> release -> how its message begins."""
CHECKED_IN = {
    "0.5.14": "sglang/srt/server_args.py",
    "0.5.23": "sglang/srt/arg_groups/validation_hook.py",
}


@pytest.fixture
def model(checkpoint: Checkpoint) -> Path:
    return checkpoint("nvidia__DeepSeek-V4-Flash-NVFP4", experts=2)


@pytest.fixture
def checking(sglang_tree: Tree, model: Path, tmp_path: Path) -> Callable[[str], Trace]:
    """The trace of a plain launch by a real tree whose check is the given body."""

    def trace(body: str) -> Trace:
        lines = f"def _check(self):\n{body}\nServerArgs.check_server_args = _check\n"
        tree = changed_tree(sglang_tree("0.5.14"), tmp_path / "tree", "srt/server_args.py", lines)
        return traced(trace_launch(request(tree, model), use_cache=False))

    return trace


@pytest.mark.parametrize("version", CHECKED_IN)
def test_what_the_server_refuses_before_it_loads(
    version: str, sglang_tree: Tree, model: Path
) -> None:
    tree = sglang_tree(version)
    fine = (*EAGLE, *TWO_NODES)
    asked = [request(tree, model, flags) for flags in (fine, *REFUSED)]
    good, *bad = map(traced, trace_launches(asked, use_cache=False))
    assert (good.errors, good.unresolved) == ((), ())
    assert len(good.of(Role.DRAFT)) == 1
    for trace, messages in zip(bad, REFUSED.values(), strict=True):
        [error] = trace.errors
        assert (error.phase, error.type) == ("arguments", "AssertionError")
        assert error.message.startswith(messages[version])
        assert error.at is not None
        assert error.at.file == CHECKED_IN[version]
        assert (trace.layers, trace.unresolved) == ((), ())
        assert trace.resolved_args["attention_backend"] == "dsv4"


def test_a_refusal_is_an_error_of_the_launch(
    sglang_tree: Tree, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["check", str(model), "--sglang", sglang_tree("0.5.14").root, "--arch", "sm_120"]
    flags = ["--", "--tp", "2", "--nnodes", "3", "--dist-init-addr", "10.0.0.1:5000"]
    assert run([*command, "--format", "json", *flags]) == 1
    report = json.loads(capsys.readouterr().out)
    [finding] = [one for one in report["findings"] if one["rule"] == "DSV105"]
    assert "tp_size must be divisible by number of nodes" in finding["message"]
    assert "resolves its arguments" in finding["consequence"]
    assert finding["locations"][0]["file"] == CHECKED_IN["0.5.14"]


def test_the_servers_own_path_names_the_model(
    sglang_tree: Tree, model: Path, tmp_path: Path
) -> None:
    """SGLang takes no colon in a name, which is the path by default: not this machine's path."""
    folder = tmp_path / "disk:1"
    folder.symlink_to(model)
    here = request(sglang_tree("0.5.14"), folder, ())
    there = replace(here, launch=replace(here.launch, model="/models/flash"))
    moved = replace(here, model_path=model)
    refused, fine, also = map(traced, trace_launches([here, there, moved], use_cache=False))
    assert fine.errors == ()
    for trace in (refused, also):
        [error] = trace.errors
        assert "cannot contain a colon" in error.message


def test_an_assertion_without_a_message_says_what_it_asserts(
    checking: Callable[[str], Trace],
) -> None:
    trace = checking("    assert (\n        self.tp_size\n        == 3\n    )")
    [error] = trace.errors
    assert (error.type, error.message) == ("AssertionError", "assert self.tp_size == 3")


def test_what_the_check_settles_is_what_the_launch_runs_with(
    checking: Callable[[str], Trace],
) -> None:
    trace = checking("    self.context_length = 4096")
    assert trace.errors == ()
    assert trace.resolved_args["context_length"] == 4096
    assert "context_length" in {change.name for change in trace.arg_changes}


def test_a_check_that_cannot_be_answered_here_is_not_determined(
    checking: Callable[[str], Trace],
) -> None:
    """What a trace may not do says nothing of the server."""
    trace = checking("    import socket\n    socket.create_connection(('127.0.0.1', 9))")
    assert trace.errors == ()
    [doubt] = trace.unresolved
    assert doubt.startswith("arguments: ")
    assert "network" in doubt
    assert len(trace.of(Role.MAIN)) == 43


def test_a_check_that_asks_a_stand_in_is_not_determined(
    sglang_tree: Tree, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """pydantic reads the publisher's configuration, and a trace stands in for it."""
    flags = ("--load-publish-endpoint", "auto", "--kv-events-config", '{"publisher": "zmq"}')
    tree = sglang_tree("0.5.23")
    trace = traced(trace_launch(request(tree, model, flags), use_cache=False))
    assert trace.errors == ()
    [doubt] = trace.unresolved
    assert "KVEventsConfig" in doubt
    assert len(trace.of(Role.MAIN)) == 43
    command = ["trace-moe", str(model), "--sglang", tree.root, "--arch", "sm_120"]
    assert run([*command, "--", "--tp", "4", *flags]) == 3
    assert "KVEventsConfig" in capsys.readouterr().out


def test_a_release_without_such_a_check_is_said_to_have_none(
    sglang_tree: Tree, model: Path, tmp_path: Path
) -> None:
    tree = changed_tree(
        sglang_tree("0.5.14"),
        tmp_path / "tree",
        "srt/server_args.py",
        "del ServerArgs.check_server_args",
    )
    trace = traced(trace_launch(request(tree, model, ("--nnodes", "3")), use_cache=False))
    assert trace.errors == ()
    assert any("check_server_args" in text for text in trace.leniencies)
