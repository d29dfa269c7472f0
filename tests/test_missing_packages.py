"""What the serving interpreter lacks: no kernel of it is promised, and no kernel at all of a server
that does not start without it."""

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tracing import request, traced

from dsv4doctor.audit import judged
from dsv4doctor.models import (
    ARCHS,
    HotPath,
    Layer,
    Location,
    MissingImport,
    Role,
    SglangTree,
    Trace,
    Verdict,
)
from dsv4doctor.rules.samples import MAIN_CUTLASS, MAIN_TRTLLM
from dsv4doctor.trace import cache
from dsv4doctor.trace.session import TraceRequest, trace_launch
from dsv4doctor.trace.worker.requirements import declared_packages, requirements_by_root
from dsv4doctor.verdicts import after_imports, judge

STOCK = "deepseek-ai__DeepSeek-V4-Flash"
MARLIN = ("--moe-runner-backend", "marlin")
# What SGLang takes from the packages that it requires, and does not require itself.
BROUGHT_ALONG = {"starlette": "", "dill": "def extend(*args, **options): pass\n"}

Tree = Callable[[str], SglangTree]
Checkpoint = Callable[..., Path]


def serving(tree: SglangTree, model: Path, site: Path, lacking: str, arch: str) -> TraceRequest:
    """A launch in an environment with all that a release requires, but for one import name."""
    roots = dict.fromkeys(declared_packages(cache.metadata_text(tree)), "") | BROUGHT_ALONG
    for root, text in roots.items():
        if root != lacking and importlib.util.find_spec(root) is None:
            (site / root).mkdir(parents=True)
            (site / root / "__init__.py").write_text(text)
    installed = replace(tree, origin="installed")
    environment = {"PYTHONPATH": str(site)}
    return request(installed, model, MARLIN, ARCHS[arch], environment, with_paths=True)


def outcome(asked: TraceRequest) -> Trace:
    return judged(traced(trace_launch(asked, use_cache=False)), {})


def experts(trace: Trace) -> Layer:
    return trace.of(Role.MAIN)[-1]


def path(trace: Trace, name: str) -> HotPath:
    return next(found for found in trace.paths if found.name == name)


@pytest.mark.wheels
@pytest.mark.parametrize(
    ("version", "requirement"),
    [("0.5.14", "sglang-kernel==0.4.4"), ("0.5.23", "sglang-kernel==0.4.10")],
)
def test_without_sgl_kernel_the_server_does_not_start_and_nothing_runs(
    version: str, requirement: str, sglang_tree: Tree, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    tree, model = sglang_tree(version), checkpoint(STOCK, experts=1)
    asked = serving(tree, model, tmp_path, "sgl_kernel", "sm_90")
    found = outcome(asked)
    [missing] = found.missing
    assert (missing.package, missing.requirement) == ("sgl_kernel", requirement)
    assert missing.at.file.startswith("sglang/srt/")
    assert missing.at.source is not None
    assert "sgl_kernel" in missing.at.source
    assert {part.verdict for part in (*found.layers, *found.paths)} == {Verdict.FAILS}
    where = f"{missing.at.file}:{missing.at.line}"
    said = f"SGLang raises ModuleNotFoundError at {where}: No module named 'sgl_kernel'"
    assert experts(found).reason == said

    (tmp_path / "sgl_kernel").mkdir()
    (tmp_path / "sgl_kernel" / "__init__.py").touch()
    whole = outcome(asked)
    assert whole.missing == ()
    assert not any("required by SGLang" in text for text in whole.leniencies)
    assert experts(whole).verdict is Verdict.RUNS


@pytest.mark.wheels
@pytest.mark.parametrize("version", ["0.5.14", "0.5.23"])
def test_what_only_the_server_around_the_model_imports(
    version: str, sglang_tree: Tree, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """The scheduler is left out of a trace; its imports are read."""
    tree, model = sglang_tree(version), checkpoint(STOCK, experts=1)
    found = outcome(serving(tree, model, tmp_path, "setproctitle", "sm_90"))
    [missing] = found.missing
    assert (missing.package, missing.requirement) == ("setproctitle", "setproctitle")
    assert missing.at.file == "sglang/srt/managers/scheduler.py"
    assert missing.at.source == "import setproctitle"
    assert experts(found).verdict is Verdict.FAILS


@pytest.mark.wheels
def test_what_a_borrowed_interpreter_lacks_is_taken_to_be_there(
    sglang_tree: Tree, checkpoint: Checkpoint
) -> None:
    launch = request(sglang_tree("0.5.14"), checkpoint(STOCK, experts=1), MARLIN, ARCHS["sm_90"])
    borrowed = outcome(launch)
    assert borrowed.missing == ()
    assert experts(borrowed).verdict is Verdict.RUNS
    bare = outcome(replace(launch, tree=replace(launch.tree, origin="installed")))
    assert "sgl_kernel" in [missing.package for missing in bare.missing]
    assert experts(bare).verdict is Verdict.FAILS


@pytest.mark.wheels
def test_a_kernel_that_is_compiled_with_a_package_that_is_not_there(
    sglang_tree: Tree, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """0.5.14 imports tvm_ffi when it compiles its first kernel."""
    tree, model = sglang_tree("0.5.14"), checkpoint(STOCK, experts=1)
    found = outcome(serving(tree, model, tmp_path, "tvm_ffi", "sm_90"))
    assert found.missing == ()
    layer = experts(found)
    assert layer.kernel is not None
    assert layer.kernel.symbol.startswith("jit:")
    assert layer.verdict is Verdict.UNKNOWN
    assert "pip install 'apache-tvm-ffi==0.1.9'" in layer.reason


@pytest.mark.wheels
def test_sglangs_own_answer_to_a_package_that_is_not_there(
    sglang_tree: Tree, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """It catches that TileLang cannot be imported, and raises when a kernel of it is needed."""
    tree, model = sglang_tree("0.5.14"), checkpoint(STOCK, experts=1)
    found = outcome(serving(tree, model, tmp_path, "tilelang", "sm_90"))
    assert found.missing == ()
    assert experts(found).verdict is Verdict.RUNS
    post = path(found, "mhc-post")
    assert post.verdict is Verdict.FAILS
    assert post.error is not None
    assert "tilelang is not installed" in post.error.message


@pytest.mark.wheels
def test_an_import_on_the_way_to_a_kernel(
    sglang_tree: Tree, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """0.5.23 asks whether FlashInfer is there, and on sm_120 imports it when attention runs."""
    tree, model = sglang_tree("0.5.23"), checkpoint(STOCK, experts=1)
    asked = serving(tree, model, tmp_path / "one", "flashinfer", "sm_120")
    found = outcome(asked)
    assert found.missing == ()
    decode = path(found, "sparse-mla-decode")
    assert decode.verdict is Verdict.FAILS
    assert "ModuleNotFoundError" in decode.reason
    assert "No module named 'flashinfer'" in decode.reason

    asked = serving(tree, model, tmp_path / "other", "flash_mla", "sm_90")
    decode = path(outcome(asked), "sparse-mla-decode")
    assert decode.verdict is Verdict.UNKNOWN  # its import comes before the layer's own dispatch
    assert "pip install 'sgl-flash-mla==" in decode.reason


def test_what_fails_by_itself_keeps_its_reason() -> None:
    missing = (MissingImport("sgl_kernel", None, Location("sglang/srt/utils/common.py", 300)),)
    for layer, kept in ((MAIN_TRTLLM[0], True), (MAIN_CUTLASS[0], False)):
        before = judge(layer, ARCHS["sm_120"])
        assert (before.verdict is Verdict.FAILS) == kept
        after = after_imports(before, missing)
        assert (after == before) == kept
        assert after.verdict is Verdict.FAILS
        assert after_imports(before, ()) == before


def test_requirements_by_import_name() -> None:
    text = (
        "Requires-Dist: flashinfer_python[cu13]==0.6.12\n"
        "Requires-Dist: sgl-deep-gemm==0.1.3; sys_platform == 'linux'\n"
        "Requires-Dist: timm==1.0.16; extra == 'test'\n"
    )
    assert requirements_by_root(text) == {
        "flashinfer": "flashinfer_python==0.6.12",
        "deep_gemm": "sgl-deep-gemm==0.1.3",
    }


def test_what_is_installed_beside_the_interpreter_counts(
    tmp_path: Path, checkpoint: Checkpoint
) -> None:
    """A package that comes to PYTHONPATH or to the user's own folder is another trace."""
    (tmp_path / "tree" / "sglang").mkdir(parents=True)
    tree = SglangTree(str(tmp_path / "tree"), "0.5.23", "installed")
    model = checkpoint(STOCK, experts=1)
    user = tmp_path / "home" / ".local" / "lib" / "python3.12" / "site-packages"
    site = tmp_path / "site"
    for folder in (user, site):
        folder.mkdir(parents=True)
    environment = {"PYTHONPATH": str(site), "HOME": str(tmp_path / "home")}
    asked = request(tree, model, environment=environment)
    borrowed = request(replace(tree, origin="folder"), model, environment=environment)
    keys = [cache.key(asked)]
    for folder in (user, site):
        (folder / "sgl_kernel").mkdir()
        keys.append(cache.key(asked))
    keys.append(cache.key(borrowed))
    assert len(set(keys)) == 4
    (site / "flashinfer").mkdir()
    assert cache.key(borrowed) == keys[-1]
    assert asked.user_base() == str(tmp_path / "home" / ".local")
    without = replace(asked, environment={"PYTHONNOUSERSITE": "1"})
    assert without.user_base() is None
