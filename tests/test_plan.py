"""A plan's parts: GPUs, ports, memory, flags, files.  Nothing is traced here."""

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from planning import boxed, standing

from dsv4doctor.errors import UsageError
from dsv4doctor.launch import read_script
from dsv4doctor.memory import Parallel, TorchIndexer, weights
from dsv4doctor.models import Arch, GpuFacts, HostFacts, Location, SglangTree
from dsv4doctor.planning.build import Ask, plan
from dsv4doctor.planning.explain import explained
from dsv4doctor.planning.files import check_folder, write
from dsv4doctor.planning.layout import Plan, Setting
from dsv4doctor.planning.ports import Allotment, listening
from dsv4doctor.planning.release import read_release
from dsv4doctor.planning.render import KINDS, files, names, of_kind
from dsv4doctor.planning.settings import parse_extra
from dsv4doctor.planning.sizing import Load, size
from dsv4doctor.planning.topology import choose, divide, parse_gpus, sizes_allowed, together
from dsv4doctor.planning.yaml_text import yaml_text
from dsv4doctor.router import read_router, reads_as_router

FLASH = "deepseek-ai__DeepSeek-V4-Flash"
V41 = "deepseek-ai__DeepSeek-V4.1-Flash"
RELEASE = "0.5.23"
PAIR, SINGLE = Ask(True), Ask(False)
Builder = Callable[..., Path]
Trees = Callable[[str], SglangTree]


@pytest.fixture(scope="module")
def tree(sglang_tree: Trees) -> SglangTree:
    return sglang_tree(RELEASE)


@pytest.fixture(scope="module")
def flash(checkpoint: Builder) -> Path:
    return checkpoint(FLASH)


@pytest.fixture(scope="module")
def pair(flash: Path, tree: SglangTree) -> Plan:
    return plan(PAIR, standing(flash, tree, PAIR))


def _flag(words: tuple[str, ...], name: str) -> str:
    return words[words.index(name) + 1]


# ------------------------------------------------------------------------------ GPUs


def test_each_side_has_a_numa_node() -> None:
    mixed = boxed((0, 1, 0, 1))
    prefill, decode = divide(mixed.gpus, (1, 2, 4))
    assert [gpu.index for gpu in prefill.gpus] == [0, 2]
    assert (prefill.nodes, decode.nodes) == ((0,), (1,))


def test_one_node_or_none_is_halved() -> None:
    for nodes in ((0, 0, 0, 0), (None, None, None, None), (0, 0, 1, None)):
        prefill, decode = divide(boxed(nodes).gpus, (1, 2))
        assert [gpu.index for gpu in prefill.gpus] == [0, 1]
        assert [gpu.index for gpu in decode.gpus] == [2, 3]


def test_four_nodes_are_two_and_two() -> None:
    prefill, decode = divide(boxed((0, 1, 2, 3)).gpus, (1, 2))
    assert (prefill.nodes, decode.nodes) == ((0, 1), (2, 3))


@pytest.mark.parametrize(
    ("nodes", "said", "way_out"),
    [
        ((0,), "1 GPU:", "plan single"),
        ((0, 0, 1), "3 GPUs:", "--gpus 0,1"),
        ((0, 0, 0, 1), "3 GPUs on the first NUMA nodes and 1", "--gpus"),
        ((0, 0, 0, 1, 1, 1), "cannot be divided by 3", "pick 2"),
    ],
)
def test_gpus_that_make_no_pair(nodes: tuple[int, ...], said: str, way_out: str) -> None:
    with pytest.raises(UsageError) as raised:
        divide(boxed(nodes).gpus, (1, 2, 4))
    assert said in raised.value.message
    assert way_out in str(raised.value.hint)


def test_a_server_of_three_gpus() -> None:
    with pytest.raises(UsageError, match="cannot be divided by 3"):
        together(boxed((0, 0, 0)).gpus, (1, 2, 4))


def test_sizes_that_divide_heads_and_experts() -> None:
    assert sizes_allowed(64, 256, 8) == (1, 2, 4, 8)
    assert 3 in sizes_allowed(None, None)


@pytest.mark.parametrize("text", ["", "x", "0-", "3-1", "0,0", "0-3@", "0-99", "-1", "0;1"])
def test_a_list_that_is_none(text: str) -> None:
    with pytest.raises(UsageError, match="--gpus"):
        parse_gpus(text)


def test_gpus_as_said_and_as_seen() -> None:
    named = parse_gpus("0-1@0,2-3@1")
    declared = choose(GpuFacts(()), named, Arch(12, 0), 95)
    assert [(gpu.index, gpu.numa_node, gpu.memory_bytes >> 30) for gpu in declared] == [
        (0, 0, 95),
        (1, 0, 95),
        (2, 1, 95),
        (3, 1, 95),
    ]
    with pytest.raises(UsageError, match="memory"):
        choose(GpuFacts(()), named, Arch(12, 0), None)
    with pytest.raises(UsageError, match="no GPU to plan for"):
        choose(GpuFacts((), unavailable="no driver"), (), Arch(12, 0), None)
    seen = choose(boxed(), parse_gpus("2,5"), Arch(12, 0), None)
    assert [(gpu.index, gpu.numa_node) for gpu in seen] == [(2, 0), (5, 1)]
    with pytest.raises(UsageError, match="there is no GPU 9"):
        choose(boxed(), parse_gpus("9"), Arch(12, 0), None)
    other = replace(boxed().gpus[0], name="NVIDIA H200", arch=Arch(9, 0))
    with pytest.raises(UsageError, match="several kinds"):
        choose(GpuFacts((*boxed().gpus, other)), (), Arch(12, 0), None)


# ------------------------------------------------------------------------------ ports


def test_no_port_twice_and_no_busy_one() -> None:
    busy = {30000, 30001}
    ports = Allotment(busy.__contains__)
    assert ports.near(30000, "a server") == 30002
    assert ports.near(30002, "another") == 30003
    assert ports.moved[0] == "a server is on port 30002: 30000 is taken"
    with pytest.raises(UsageError, match="--port 30001: something on this machine"):
        ports.exactly(30001, "--port")
    with pytest.raises(UsageError, match="--port 30002: the plan already"):
        ports.exactly(30002, "--port")


def test_a_port_that_something_has() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        assert listening(port)
    assert not listening(port)


def test_all_ports_of_a_pair_differ(pair: Plan) -> None:
    assert pair.router is not None
    found = [port for one in pair.servers for port in (one.ports.service, one.ports.dist_init)]
    found += [pair.router.port, pair.router.metrics_port]
    found += {one.ports.bootstrap or 0 for one in pair.servers}
    assert len(set(found)) == len(found) == 7


# ------------------------------------------------------------------------------ memory


_TORCH = TorchIndexer(64, 128, 4, None, Location("indexer.py", 155))
"""SGLang 0.5.14's, which takes every new token at once."""


def test_a_torch_indexer_has_room_in_prefill(flash: Path, tree: SglangTree) -> None:
    ask = Ask(False)
    on = replace(standing(flash, tree, ask), indexer=_TORCH)
    made = plan(ask, on)
    [server] = made.servers
    chunk = int(_flag(server.words, "--chunked-prefill-size"))
    fraction = float(_flag(server.words, "--mem-fraction-static"))
    assert (chunk, made.problems) == (1024, ())
    assert _TORCH.bytes(chunk, 131072) < 95 * 2**30 * (1 - fraction)
    assert "of it for the indexer's torch operations" in explained(made, 9999)
    short = plan(replace(ask, context=8192), on)
    assert int(_flag(short.servers[0].words, "--chunked-prefill-size")) == 8192


def test_a_torch_indexer_that_nothing_makes_fit(flash: Path, tree: SglangTree) -> None:
    ask = Ask(False, context=1_048_576)
    [problem] = plan(ask, replace(standing(flash, tree, ask), indexer=_TORCH)).problems
    assert "256 new tokens a step" in problem
    for way in ("FIX104", "smaller --context", "--sglang VERSION"):
        assert way in problem
    assert not plan(ask, standing(flash, tree, ask)).problems


def test_memory_of_a_side(flash: Path, tree: SglangTree) -> None:
    on = standing(flash, tree, PAIR)

    def sized(gib: float, ranks: int, context: int = 131072, prefills: bool = True):  # type: ignore[no-untyped-def]
        return size(
            on.target.checkpoint,
            on.features,
            memory=int(gib * 2**30),
            ranks=ranks,
            load=Load(context, 32, 1),
            prefills=prefills,
            decodes=not prefills,
        )

    roomy = sized(95, 4)
    assert roomy.short is None
    assert roomy.chunk == 8192
    # 95 GiB less SGLang's own 512 MiB + 1.5 MiB x 8192 + 128 MiB x 4.
    assert roomy.fraction == pytest.approx((95 - 13) / 95, abs=0.001)
    assert roomy.weights.total / 2**30 == pytest.approx(39, abs=3)
    assert sized(95, 4, prefills=False).fraction == pytest.approx(85 / 95, abs=0.001)
    tight = sized(50, 4, context=1_000_000)
    assert tight.chunk is not None
    assert tight.chunk < 8192
    assert tight.short is None
    none = sized(95, 1)
    assert none.short is not None
    assert "the weights take" in none.short
    few = sized(46, 4, context=1_048_576)
    assert few.indexer == 0
    assert few.short is not None
    assert "less than one request" in few.short


@pytest.mark.parametrize(
    ("flags", "attention"),
    [
        ((), 8),
        (("--dp-size", "8"), 8),
        (("--dp-size", "8", "--enable-dp-attention"), 1),
        (("--data-parallel-size=4", "--enable-dp-attention"), 2),
    ],
)
def test_data_parallel_attention_is_whole_in_each_replica(
    flash: Path, tree: SglangTree, flags: tuple[str, ...], attention: int
) -> None:
    ask = Ask(False, flags=flags)
    on = standing(flash, tree, ask)
    need = weights(on.target.checkpoint, Parallel(8, attention), draft=False, wo_a_in_bf16=True)
    [whole] = plan(ask, on).servers
    [fraction] = [flag for flag in whole.flags if flag.name == "--mem-fraction-static"]
    assert f" {need.total / 2**30:.1f} GiB of weights" in fraction.why


def test_a_plan_that_does_not_fit_says_so(flash: Path, tree: SglangTree) -> None:
    ask = Ask(True, gpus="0-1")
    tight = plan(ask, standing(flash, tree, ask))
    assert len(tight.problems) == 2
    assert "the weights take" in tight.problems[0]
    script = files(tight, "scripts", Path(tree.root), None)["prefill.sh"]
    assert "# NOT SOUND: prefill: the weights take" in script


# ------------------------------------------------------------------------------ flags


def test_sides_differ_where_they_must_and_only_there(pair: Plan) -> None:
    prefill, decode = ({one.name: one.values for one in side.flags} for side in pair.servers)
    differing = {name for name in {*prefill, *decode} if prefill.get(name) != decode.get(name)}
    assert differing == {
        "--port",
        "--dist-init-addr",
        "--mem-fraction-static",
        "--chunked-prefill-size",
        "--max-running-requests",
        "--cuda-graph-max-bs-decode",
        "--disaggregation-mode",
    }


def test_every_flag_is_the_releases_own(
    checkpoint: Builder, sglang_tree: Trees, pair: Plan
) -> None:
    known = read_release(Path(sglang_tree(RELEASE).root))
    assert {flag.name for side in pair.servers for flag in side.flags} <= known.options
    assert "nixl" in known.transfer_backends
    words = pair.servers[0].words
    assert _flag(words, "--reasoning-parser") == "deepseek-v4"
    assert _flag(words, "--tool-call-parser") == "deepseekv4"
    newest = plan(PAIR, standing(checkpoint(V41), sglang_tree(RELEASE), PAIR))
    assert _flag(newest.servers[0].words, "--reasoning-parser") == "deepseek-v41"


def test_every_value_has_a_reason(pair: Plan) -> None:
    text = explained(pair, 9999)
    for side in pair.servers:
        for one in (*side.flags, *side.environment):
            assert one.why
            assert f"  {one.shown}\n      {one.why}\n" in text


def test_speculation_is_equal_on_both(checkpoint: Builder, tree: SglangTree) -> None:
    ask = Ask(True, speculative="auto")
    for name, algorithm in ((FLASH, "EAGLE"), (f"{FLASH}-0731", "DSPARK")):
        found = plan(ask, standing(checkpoint(name), tree, ask))
        sides = [
            [flag for flag in side.flags if flag.name.startswith("--speculative")]
            for side in found.servers
        ]
        assert sides[0] == sides[1]
        assert sides[0][0].values == (algorithm,)


def test_thinking_as_asked(flash: Path, sglang_tree: Trees) -> None:
    """A flag where the release has one, else its variable."""
    ask = Ask(True, thinking="on")
    new = plan(ask, standing(flash, sglang_tree(RELEASE), ask))
    for side in new.servers:
        assert _flag(side.words, "--default-chat-template-kwargs") == '{"thinking": true}'
    old = plan(ask, standing(flash, sglang_tree("0.5.14"), ask))
    assert ("SGLANG_DEFAULT_THINKING", ("1",)) in [(one.name, one.values) for one in old.shared]
    assert not any("chat-template" in word for word in old.servers[0].words)


def test_own_flags_go_to_both_sides(flash: Path, tree: SglangTree) -> None:
    ask = Ask(
        True, flags=("--disable-radix-cache", "--mem-fraction-static=0.7", "--log-level", "x")
    )
    for side in plan(ask, standing(flash, tree, ask)).servers:
        assert "--disable-radix-cache" in side.words
        assert _flag(side.words, "--mem-fraction-static") == "0.7"
        assert side.words.count("--mem-fraction-static") == 1
        assert _flag(side.words, "--log-level") == "x"


@pytest.mark.parametrize("words", [("--port", "1"), ("--tp=8",), ("x",), ("--model-path", "m")])
def test_flags_that_the_plan_decides(words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError):
        parse_extra(words)


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (Ask(True, transfer="carrier-pigeon"), "no such transfer backend"),
        (Ask(True, context=2_000_000), "1,048,576 tokens at most"),
        (Ask(True, gpus="0-2"), "3 GPUs"),
        (Ask(True, host="a b"), "--host a b: no name"),
        (Ask(True, variables=(("X", "a\nb"),)), "--env X: a value with control characters"),
    ],
)
def test_what_cannot_be_had(ask: Ask, said: str, flash: Path, tree: SglangTree) -> None:
    with pytest.raises(UsageError, match=said):
        plan(ask, standing(flash, tree, ask))


def test_no_binding_where_it_is_not_allowed(flash: Path, tree: SglangTree) -> None:
    locked = HostFacts(may_set_memory_policy=False, container="docker")
    found = plan(PAIR, standing(flash, tree, PAIR, host=locked))
    assert not any(side.bind for side in found.servers)
    assert any("may not bind" in note for note in found.notes)
    assert "numactl" not in files(found, "scripts", Path(tree.root), None)["prefill.sh"]
    across = plan(SINGLE, standing(flash, tree, SINGLE))
    assert any("across NUMA nodes" in note for note in across.notes)


# ------------------------------------------------------------------------------ files


def test_scripts_say_what_was_planned(pair: Plan, tree: SglangTree, tmp_path: Path) -> None:
    """Read back by the reader of launch scripts."""
    write(tmp_path, files(pair, "scripts", Path(tree.root), None), force=False)
    for side in pair.servers:
        script = tmp_path / f"{side.part.value}.sh"
        assert os.access(script, os.X_OK)
        subprocess.run(["bash", "-n", script], check=True)
        launch = read_script(script, {})
        assert launch.model == pair.model
        assert launch.flags == side.words
        assert launch.numa_nodes == side.nodes
        assert launch.environment["CUDA_VISIBLE_DEVICES"] == side.environment[0].values[0]
        assert launch.environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
        assert launch.notes == ()
        assert not reads_as_router(script, {})
    subprocess.run(["bash", "-n", tmp_path / "router.sh"], check=True)
    assert reads_as_router(tmp_path / "router.sh", {})
    router = read_router(tmp_path / "router.sh", {})
    prefill, decode = pair.servers
    bootstrap = str(prefill.ports.bootstrap)
    assert router.pd
    assert router.prefill == ((f"http://127.0.0.1:{prefill.ports.service}", bootstrap),)
    assert router.decode == (f"http://127.0.0.1:{decode.ports.service}",)


def test_a_script_starts_what_it_says(pair: Plan, tree: SglangTree, tmp_path: Path) -> None:
    """Run by a real bash, with a `numactl` that prints what it is given."""
    folder = tmp_path / "a folder"
    odd = replace(pair, model="/models/it's $HOME")
    write(folder, files(odd, "scripts", Path(tree.root), None), force=False)
    fake = tmp_path / "numactl"
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$CUDA_VISIBLE_DEVICES" "$@"\n')
    fake.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [folder / "decode.sh"], env={"PATH": path}, capture_output=True, text=True, check=True
    )
    devices, *words = done.stdout.splitlines()
    assert devices == "4,5,6,7"
    assert words[:3] == ["--cpunodebind=1", "--membind=1", "python"]
    assert words[5:7] == ["--model-path", "/models/it's $HOME"]
    assert tuple(words[7:]) == pair.servers[1].words


def test_a_name_is_no_way_into_a_file(pair: Plan, tree: SglangTree, tmp_path: Path) -> None:
    """The checkpoint's folder and a reason come from elsewhere."""
    evil = "x\ntouch gone\r\nexit 1\x1b[2J"
    first = pair.servers[0]
    flags = tuple(replace(flag, why=evil) for flag in first.flags)
    worded = replace(first, flags=(*flags, Setting("--log-level", ("$(touch gone)",), evil)))
    odd = replace(
        pair, model_name=evil, servers=(worded, pair.servers[1]), problems=(evil,), notes=(evil,)
    )
    placed = replace(odd, interpreter="/opt/py thon")
    for kind in KINDS:
        for name, text in files(placed, kind, Path(tree.root), None).items():
            for line in text.splitlines():
                assert "touch gone" not in line or line.lstrip().startswith(
                    ("#", "Desc", "--", '"', '- "')
                )
            assert "\x1b" not in text
            if name.endswith(".yaml"):
                assert all(yaml.safe_load_all(text))
    assert "\x1b" not in explained(odd, 100)


@pytest.mark.parametrize("kind", KINDS)
def test_names_are_known_before(kind: str, pair: Plan, tree: SglangTree) -> None:
    placed = replace(pair, interpreter="/opt/sglang/bin/python")
    assert set(files(placed, kind, Path(tree.root), None)) == set(names(True, kind))


def test_compose_file(pair: Plan, tree: SglangTree) -> None:
    placed = replace(pair, model="/models/flash")
    found = files(placed, "compose", Path(tree.root), "image:1")
    services = yaml.safe_load(found["compose.yaml"])["services"]
    assert list(services) == ["prefill", "decode", "router"]
    decode = services["decode"]
    (devices,) = decode["deploy"]["resources"]["reservations"]["devices"]
    assert devices["device_ids"] == ["4", "5", "6", "7"]
    assert decode["cap_add"] == ["SYS_NICE"]
    assert decode["volumes"] == ["/models/flash:/models/dsv4:ro"]
    assert tuple(decode["command"][8:]) == pair.servers[1].words
    assert "MODEL_PATH=/models/dsv4" in found["dsv4.env"]


def test_kubernetes_objects(pair: Plan, tree: SglangTree) -> None:
    text = files(pair, "k8s", Path(tree.root), None)["dsv4.yaml"]
    config, deployment, service = yaml.safe_load_all(text)
    assert [one["kind"] for one in (config, deployment, service)] == [
        "ConfigMap",
        "Deployment",
        "Service",
    ]
    pod = deployment["spec"]["template"]["spec"]
    assert [one["name"] for one in pod["containers"]] == ["prefill", "decode", "router"]
    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    assert pod["containers"][0]["image"] == f"lmsysorg/sglang:v{RELEASE}"
    router = pod["containers"][2]["command"]
    assert router[router.index("--host") + 1] == "0.0.0.0"
    ports = service["spec"]["ports"]
    assert ports[0] == {"name": "http", "port": 8000, "targetPort": "http"}
    named = {
        one["name"]: one["containerPort"] for place in pod["containers"] for one in place["ports"]
    }
    assert {one["targetPort"] for one in ports} == set(named)
    assert all(isinstance(value, str) for value in config["data"].values())


@pytest.mark.parametrize(
    ("kind", "host", "single", "targets"),
    [
        # Nothing outside a pod reaches its loopback.
        ("k8s", "127.0.0.1", False, ["dsv4:30000", "dsv4:30001", "dsv4:30900"]),
        ("k8s", "127.0.0.1", True, ["dsv4:8000"]),
        ("scripts", "0.0.0.0", False, ["127.0.0.1:30000", "127.0.0.1:30001", "127.0.0.1:30900"]),
        ("scripts", "0.0.0.0", True, ["127.0.0.1:30000"]),
        ("scripts", "10.1.2.3", True, ["10.1.2.3:30000"]),
        ("compose", "::1", True, ["[::1]:30000"]),
    ],
)
def test_prometheus_asks_where_something_listens(
    pair: Plan, tree: SglangTree, kind: str, host: str, single: bool, targets: list[str]
) -> None:
    asked = replace(pair, host=host)
    if single:
        asked = replace(asked, servers=pair.servers[:1], router=None)
    found = files(asked, kind, Path(tree.root), None)
    jobs = yaml.safe_load(found["prometheus.yml"])["scrape_configs"]
    assert [one["static_configs"][0]["targets"] for one in jobs] == [[one] for one in targets]
    if kind != "k8s":
        return
    _, deployment, service = yaml.safe_load_all(found["dsv4.yaml"])
    ports = {f"dsv4:{one['port']}": one["targetPort"] for one in service["spec"]["ports"]}
    for container in deployment["spec"]["template"]["spec"]["containers"]:
        words = container["command"]
        hosts = [words[at + 1] for at, word in enumerate(words) if word.endswith("-host")]
        assert set(hosts) == {"0.0.0.0"}
    assert set(targets) <= set(ports)


def test_one_server_in_a_pod_is_told_as_it_is(pair: Plan, tree: SglangTree) -> None:
    """Nothing in the manifest binds, and clients reach it: so its comments say."""
    server = replace(pair.servers[0], bind=True)
    numactl = "numactl has to be installed where the servers start"
    assert numactl in pair.notes
    single = replace(pair, servers=(server,), router=None)
    text = files(single, "k8s", Path(tree.root), None)["dsv4.yaml"]
    assert "--host 0.0.0.0: inside the pod" in text
    assert "--host 127.0.0.1" not in text
    assert "numactl" not in text
    for kind in ("k8s", "systemd"):
        shown = of_kind(single, kind)
        assert numactl not in shown.notes
    assert "numactl" not in explained(of_kind(single, "k8s"), 100)
    assert numactl in of_kind(single, "scripts").notes


def test_what_is_explained_fits_the_terminal(pair: Plan) -> None:
    narrow = explained(pair, 60)
    long = [line for line in narrow.splitlines() if len(line) > 60]
    assert all(len(line.split()) <= 2 for line in long)
    assert narrow.split() == explained(pair, 9999).split()


def test_systemd_units(pair: Plan, tree: SglangTree, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--kind systemd"):
        files(replace(pair, interpreter="python"), "systemd", Path(tree.root), None)
    odd = replace(pair, interpreter=shutil.which("true") or "/bin/true", model_name="100% $HOME")
    found = files(odd, "systemd", Path(tree.root), None)
    decode = found["dsv4-decode.service"]
    assert "NUMAPolicy=bind\nNUMAMask=1\nCPUAffinity=numa\n" in decode
    assert "--disaggregation-mode decode" in decode
    assert (
        "After=network-online.target dsv4-prefill.service dsv4-decode.service"
        in (found["dsv4-router.service"])
    )
    if shutil.which("systemd-analyze"):
        for name, text in found.items():
            (tmp_path / name).write_text(text)
        units = [tmp_path / name for name in found if name.endswith(".service")]
        done = subprocess.run(
            ["systemd-analyze", "verify", *units], capture_output=True, text=True, check=False
        )
        ours = [line for line in done.stderr.splitlines() if "dsv4-" in line]
        assert not ours


def test_yaml_is_what_a_reader_reads() -> None:
    data = {
        "on": "yes",
        "1": ["a: b", "#", "", {"x": [], "y": {}, "deep": [[1, 2], {"k": None}]}],
        "text": "two\nlines \"quoted\" \u00e9 'x'",
        "number": 1.5,
        "true": True,
    }
    assert yaml.safe_load(yaml_text(data)) == data


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    held = tmp_path / "file"
    held.write_text("")
    with pytest.raises(UsageError, match="not a folder"):
        check_folder(held)
    with pytest.raises(UsageError, match="cannot be written"):
        check_folder(held / "below")
    (tmp_path / "prefill.sh").write_text("mine")
    with pytest.raises(UsageError, match=r"prefill\.sh already there"):
        write(tmp_path, {"prefill.sh": "new", "decode.sh": "new"}, force=False)
    assert (tmp_path / "prefill.sh").read_text() == "mine"
    assert not (tmp_path / "decode.sh").exists()
    write(tmp_path, {"prefill.sh": "new"}, force=True)
    assert (tmp_path / "prefill.sh").read_text() == "new"
    with pytest.raises(UsageError, match="File name too long"):
        write(tmp_path, {"prefill.sh": "newer", "x" * 300: "new"}, force=True)
    assert (tmp_path / "prefill.sh").read_text() == "new"  # all or none
    with pytest.raises(UsageError, match="cannot be written"):
        write(tmp_path / ("x" * 300), {"prefill.sh": "new"}, force=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "prefill.sh"]


def test_dashboard_is_json(pair: Plan, tree: SglangTree) -> None:
    board = json.loads(files(pair, "scripts", Path(tree.root), None)["grafana-dashboard.json"])
    assert [panel["id"] for panel in board["panels"]] == list(range(1, len(board["panels"]) + 1))
