"""The recorder: loaded by SGLang's own plugin loader, never in a server's way."""

import json
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tracing import EAGLE, request, traced

from dsv4doctor.drift import compare, read_report
from dsv4doctor.models import ARCHS, Facts, GpuFacts, Report, SglangTree, Snapshot, Verdict
from dsv4doctor.recording import hooks, observer, once, plugin, record, report
from dsv4doctor.report import json as report_json
from dsv4doctor.trace import cache
from dsv4doctor.trace.protocol import trace_from
from dsv4doctor.trace.request import TraceRequest
from dsv4doctor.trace.session import trace_launch
from dsv4doctor.trace.worker.windows import INDEXER, MLA

Tree = Callable[[str], SglangTree]
Checkpoint = Callable[..., Path]

HYBRID = "nvidia__DeepSeek-V4-Flash-NVFP4"
STOCK = "deepseek-ai__DeepSeek-V4-Flash"
FEW_LAYERS = ("--json-model-override-args", '{"num_hidden_layers": 4}')
DRIVER = Path(__file__).parent / "recording_driver.py"


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "_complained", [])
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))


# ------------------------------------------------------------------------ real trees


def served(asked: TraceRequest, folder: Path) -> Path:
    """What the recorder writes while `asked` is served as far as a CPU can."""
    described = {
        "tree": asked.tree.root,
        "metadata": cache.metadata_text(asked.tree),
        "capability": [asked.arch.major, asked.arch.minor],
        "gpu": None,
        "scratch": str(folder),
        "bytecode": str(cache.folder() / "bytecode"),
        "serving": False,
        "python_path": [],
        "user_base": None,
        "arguments": asked.arguments(),
    }
    (folder / "request.json").write_text(json.dumps(described))
    environment = {
        **{name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
        "DSV4DOCTOR_RECORD": str(folder / "recorded.json"),
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, str(DRIVER), str(folder / "request.json")],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "recording stopped" not in done.stderr
    return folder / "recorded.json"


def predicted(asked: TraceRequest) -> dict[str, Any]:
    """The report of `dsv4doctor trace --format json` for the same launch."""
    trace = traced(trace_launch(asked))
    facts = Facts(
        Snapshot("0", "", GpuFacts(()), asked.tree, None, None, None, {}), asked.arch, "", trace
    )
    plain: dict[str, Any] = json.loads(report_json.render(Report("0", facts, ())))
    return plain


@pytest.mark.wheels
@pytest.mark.parametrize(
    ("version", "model", "flags"),
    [
        ("0.5.14", HYBRID, ()),
        # While it builds this model SGLang changes an argument.
        ("0.5.14", STOCK, ("--moe-runner-backend", "marlin")),
        ("0.5.23", HYBRID, ()),
    ],
)
def test_recorded_is_what_was_predicted(
    version: str,
    model: str,
    flags: tuple[str, ...],
    sglang_tree: Tree,
    checkpoint: Checkpoint,
    tmp_path: Path,
) -> None:
    asked = request(
        sglang_tree(version), checkpoint(model), (*EAGLE, *FEW_LAYERS, *flags), with_paths=True
    )
    recorded = read_report(served(asked, tmp_path))
    expected = predicted(asked)
    assert recorded["resolved_args"] == expected["resolved_args"]
    comparison = compare(expected, recorded)
    assert comparison.exit_code == 0, [
        one for one in comparison.differences if one.standing.value != "same"
    ]
    assert len(recorded["layers"]) == 5
    assert all(layer["kernel"] for layer in recorded["layers"])
    assert {path["name"] for path in recorded["paths"]} == {
        *("dense-fp8", "kv-cache", "mhc-pre", "mhc-post"),
        *("sparse-mla-decode", "sparse-mla-prefill", "indexer-decode", "indexer-prefill"),
    }
    assert comparison.not_recorded == ("main all-reduce",)


# ------------------------------------------------------------------------ never in the way


def test_nothing_happens_without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DSV4DOCTOR_RECORD", raising=False)
    before = list(sys.meta_path)
    plugin.register()
    assert sys.meta_path == before


def test_modules_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "waited_for.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen: list[Any] = []
    plugin.when_imported({"waited_for": seen.append, "json": seen.append})
    assert [module.__name__ for module in seen] == ["json"]
    import waited_for  # type: ignore[import-not-found]

    assert seen[1] is waited_for
    assert waited_for.value == 1
    del sys.modules["waited_for"]


class Layer:
    def __init__(self) -> None:
        self.calls = 0

    def apply(self, value: int) -> int:
        self.calls += 1
        if value < 0:
            raise ValueError("negative")
        return value + 1


def test_a_method_is_itself_again_after_its_first_call() -> None:
    layer, seen = Layer(), []
    once.observe(layer, "apply", lambda calls, args, kwargs: bool(seen.append(args)) or True)
    assert "apply" in vars(layer)
    assert layer.apply(1) == 2
    assert (seen, vars(layer)) == ([(1,)], {"calls": 1})
    assert layer.apply(2) == 3
    assert len(seen) == 1


def test_what_the_method_raises_is_passed_on() -> None:
    layer, seen = Layer(), []
    once.observe(layer, "apply", lambda calls, args, kwargs: bool(seen.append(calls.error)))
    with pytest.raises(ValueError, match="negative"):
        layer.apply(-1)
    assert [str(error) for error in seen] == ["negative"]
    assert layer.calls == 1
    assert sys.getprofile() is None


def test_a_fault_of_ours_is_said_once_and_changes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(*given: object) -> bool:
        raise KeyError("ours")

    one, other = Layer(), Layer()
    once.observe(one, "apply", broken)
    once.observe(other, "apply", broken)
    assert [one.apply(1), other.apply(2), one.apply(3), other.apply(4)] == [2, 3, 4, 5]
    assert "apply" not in vars(one)
    assert "apply" not in vars(other)
    messages = [entry.getMessage() for entry in caplog.records]
    assert messages == [
        "dsv4doctor: recording stopped (KeyError: 'ours'); the server is not affected"
    ]


def test_a_fault_in_the_profiling_hook_is_not_raised_in_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*given: object) -> None:
        raise KeyError("ours")

    monkeypatch.setattr(observer.ServerCalls, "_python", broken)
    layer, seen = Layer(), []
    once.observe(layer, "apply", lambda *given: bool(seen.append(given)))
    assert [layer.apply(1), layer.apply(2)] == [2, 3]
    assert seen == []  # what was seen is not all
    assert sys.getprofile() is None
    assert len(caplog.records) == 1


def test_a_folder_that_is_not_there_does_not_stop_the_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class ModelRunner:
        def load_model(self) -> str:
            return "loaded"

    module = types.SimpleNamespace(ModelRunner=ModelRunner)
    hooks.Hooks(str(tmp_path / "no" / "file.json")).runner(module)  # type: ignore[arg-type]
    assert ModelRunner().load_model() == "loaded"
    assert len(caplog.records) == 1


@pytest.mark.parametrize("there", ["another file", "a link to one", "no text", "folder", "pipe"])
def test_what_is_no_recording_is_not_written_over(
    tmp_path: Path, there: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "file"
    match there:
        case "another file":
            path.write_text('{"schema": "dsv4doctor-report/1"}')
        case "a link to one":
            path.symlink_to(tmp_path / "config.json")
            (tmp_path / "config.json").write_text("{}")
        case "no text":
            path.write_bytes(b"\xff\xfe")
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
    before = sorted((one.name, one.lstat().st_ino) for one in tmp_path.iterdir())
    runner = types.SimpleNamespace(server_args=None)
    hooks.guarded(hooks.Hooks(str(path)).loaded, runner)
    assert sorted((one.name, one.lstat().st_ino) for one in tmp_path.iterdir()) == before
    assert len(caplog.records) == 1


def test_a_recording_is_written_anew_behind_its_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "text_of", lambda *given: "recorded in the server, anew")
    (tmp_path / "link").symlink_to("real.json")
    for _ in range(2):
        recording = record.Recording(
            str(tmp_path / "link"), types.SimpleNamespace(server_args=None), {}
        )
        recording.write()
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real.json").read_text() == "recorded in the server, anew"
    monkeypatch.setattr(record, "text_of", lambda *given: "\udcff")
    with pytest.raises(UnicodeEncodeError):
        recording.write()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["link", "real.json"]


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        ({"tp_rank": 0, "pp_rank": 0, "dp_rank": None}, "r.json"),
        ({"tp_rank": 3, "pp_rank": 0, "dp_rank": 0}, "r.tp3.json"),
        ({"tp_rank": 1, "pp_rank": 1, "dp_rank": 2}, "r.pp1.dp2.tp1.json"),
    ],
)
def test_a_file_for_each_rank(tmp_path: Path, ranks: dict[str, int | None], name: str) -> None:
    for runner in (
        types.SimpleNamespace(**ranks),
        types.SimpleNamespace(ps=types.SimpleNamespace(**ranks)),
    ):
        assert record.file_of_rank(str(tmp_path / "r.json"), runner) == tmp_path / name


class FusedMoE:
    def __init__(self, size: int) -> None:
        self.quant_method = self.get_quant_method()
        self.size = size

    def get_quant_method(self) -> object:
        if get_moe_runner_backend():
            return self
        return object()


def get_moe_runner_backend() -> str:
    return "triton"


@pytest.fixture
def layer_class(monkeypatch: pytest.MonkeyPatch) -> type[FusedMoE]:
    monkeypatch.setattr(FusedMoE, "__init__", FusedMoE.__init__)  # put back afterwards
    return FusedMoE


def test_how_a_layer_was_built(layer_class: type[FusedMoE]) -> None:
    watching = hooks.Hooks("unused")
    watching.layers(types.SimpleNamespace(FusedMoE=layer_class))  # type: ignore[arg-type]
    layer = layer_class(3)
    watching.speculative = 1
    draft = layer_class(4)
    found = watching.watch.found
    assert found[id(layer)]["flags_consulted"] == ["moe_runner_backend"]
    assert found[id(draft)]["flags_consulted"] == ["speculative_moe_runner_backend"]
    assert found[id(layer)]["decided_at"]["function"].endswith("get_quant_method")


def test_a_fault_while_a_layer_is_built_changes_nothing(
    layer_class: type[FusedMoE], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from dsv4doctor.trace.worker.layer_watch import LayerBuild

    def broken(*given: object) -> None:
        raise KeyError("ours")

    monkeypatch.setattr(LayerBuild, "_note_read", broken)
    watching = hooks.Hooks("unused")
    watching.layers(types.SimpleNamespace(FusedMoE=layer_class))  # type: ignore[arg-type]
    before = sys.gettrace()
    assert layer_class(3).size == 3
    assert layer_class(4).size == 4
    assert sys.gettrace() is before
    assert len(caplog.records) == 1


# ------------------------------------------------------------------------ what is seen


def module_from(folder: Path, name: str, source: str) -> Any:
    """A module with a file of its own: what is seen hangs on where code lies."""
    path = folder.joinpath(*name.split("/"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    module = types.ModuleType(name.removesuffix(".py").replace("/", "."))
    module.__dict__["__file__"] = str(path)
    exec(compile(source, str(path), "exec"), module.__dict__)
    return module


def test_native_entry_points_are_seen_behind_their_decorators(tmp_path: Path) -> None:
    native = module_from(
        tmp_path,
        "flashinfer/core.py",
        "def api(function):\n"
        "    def wrapper(*args):\n"
        "        return function(*args)\n"
        "    return wrapper\n"
        "def helper():\n    return 1\n"
        "@api\n"
        "def cutlass_fused_moe():\n    return helper()\n",
    )
    calling = module_from(
        tmp_path, "sglang/layer.py", "def apply(native):\n    return native.cutlass_fused_moe()\n"
    )
    calls = observer.ServerCalls(lambda: calling.apply(native))
    assert [entry["symbol"] for entry in calls.native] == ["flashinfer.core.cutlass_fused_moe"]
    assert calls.native[0]["at"]["line"] == 2
    assert calls.native[0]["stack"][0][0] == "apply"


def test_a_function_of_two_names_has_the_one_that_was_called(tmp_path: Path) -> None:
    """As DeepGEMM 0.1.3 has it: a server on an H200 called fp8_gemm_nt."""
    native = module_from(
        tmp_path,
        "deep_gemm.py",
        "def fp8_fp4_gemm_nt():\n    return 1\nfp8_gemm_nt = fp8_fp4_gemm_nt\n",
    )
    calling = module_from(
        tmp_path,
        "sglang/entry.py",
        "def other(native):\n    return native.fp8_gemm_nt()\n"
        "def own(native):\n    return native.fp8_fp4_gemm_nt()\n"
        "def apply(native):\n    other(native)\n    own(native)\n",
    )
    calls = observer.ServerCalls(lambda: calling.apply(native))
    assert [entry["symbol"] for entry in calls.native] == [
        "deep_gemm.fp8_gemm_nt",
        "deep_gemm.fp8_fp4_gemm_nt",
    ]


def test_modules_compiled_at_run_time_are_seen_again_from_their_cache(tmp_path: Path) -> None:
    calling = module_from(
        tmp_path,
        "sglang/jit.py",
        "def cache_once(fn):\n"
        "    kept = []\n"
        "    def wrapper():\n"
        "        if not kept:\n"
        "            kept.append(fn())\n"
        "        return kept[0]\n"
        "    return wrapper\n"
        "def load_jit(*args, **kwargs):\n    return object()\n"
        "@cache_once\n"
        "def _module():\n    return load_jit('moe_wna16_marlin', 'bf16_t', cuda_files=[])\n"
        "def apply():\n    return _module()\n",
    )
    first = observer.ServerCalls(calling.apply)
    second = observer.ServerCalls(calling.apply)
    assert [entry["symbol"] for entry in second.native] == ["jit:moe_wna16_marlin.bf16_t"]
    assert first.error is second.error is None


def test_triton_and_torch_ops_are_seen(tmp_path: Path) -> None:
    import torch
    import triton

    @triton.jit
    def fused_moe_kernel(pointer):  # type: ignore[no-untyped-def]
        pass

    def scale(value: torch.Tensor) -> torch.Tensor:
        return value * 2

    torch.library.custom_op("dsv4doctor_test::scale", scale, mutates_args=())
    calling = module_from(
        tmp_path,
        "sglang/both.py",
        "def apply(op, kernel, value):\n"
        "    op(value)\n"
        "    kernel.run(value, grid=(1,), warmup=False)\n",
    )
    op = torch.ops.dsv4doctor_test.scale
    real = getattr(fused_moe_kernel, "fn", None)
    calls = observer.ServerCalls(lambda: calling.apply(op, fused_moe_kernel, torch.ones(1)))
    symbols = [entry["symbol"] for entry in calls.native]
    assert symbols[0] == "torch.ops.dsv4doctor_test.scale"
    if type(fused_moe_kernel).__name__ == "JITFunction":  # not under Triton's interpreter
        assert symbols[-1] == f"triton:{real.__module__}.fused_moe_kernel"


# ------------------------------------------------------------------------ what failed


def test_a_kernel_that_raised_in_the_server_did_not_run(tmp_path: Path) -> None:
    """The call was seen, and it ended in an error that SGLang's own code did not raise."""
    native = module_from(
        tmp_path,
        "flashinfer/mla.py",
        "def sparse_decode():\n    raise RuntimeError('CUDA error: no kernel image')\n",
    )
    calling = module_from(
        tmp_path,
        "sglang/srt/layers/attention/deepseek_v4_backend.py",
        "def forward(native):\n    return native.sparse_decode()\n",
    )
    calls = observer.ServerCalls(lambda: calling.forward(native))
    recording = record.Recording.__new__(record.Recording)
    recording.paths = []
    recording._add("main", "sparse-mla-decode", ["model.layers.0"], calls, MLA)
    recording._add("main", "indexer-decode", ["model.layers.0"], calls, INDEXER)
    layer = {
        **{"name": "model.layers.0.mlp.experts", "role": "main", "quant_method": "M"},
        **{"runner_backend": None, "decided_at": None, "flags_consulted": []},
        **{"kernel": calls.native[0], "why_no_kernel": None},
        "error": record.raised("main forward", calls.error),
    }
    result: dict[str, Any] = {
        **{"resolved_args": {}, "arg_changes": [], "environment_overwritten": {}},
        **{"errors": [], "steps": [], "leniencies": [], "timings": {}},
        **{"layers": [layer], "paths": recording.paths},
    }
    tree = SglangTree(str(tmp_path), "0.5.23", "installed")
    trace = report._judged(trace_from(result, tree, ARCHS["sm_120"], None))
    mla, indexer = trace.paths
    assert mla.kernel is not None
    assert mla.kernel.symbol == "flashinfer.mla.sparse_decode"
    assert mla.verdict is trace.layers[0].verdict is Verdict.FAILS
    assert mla.reason == "recorded in the server: RuntimeError"
    assert indexer.verdict is Verdict.UNKNOWN
