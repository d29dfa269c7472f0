"""FlashInfer's own declarations, read in real wheels, and verdicts that stand on them."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dsv4doctor.errors import UndeterminedError
from dsv4doctor.evidence import cuda_source, manifest
from dsv4doctor.evidence.flashinfer import read_declarations
from dsv4doctor.evidence.gather import gather
from dsv4doctor.evidence.grounds import Grounds, grounds
from dsv4doctor.evidence.judgement import of_kernel
from dsv4doctor.evidence.wheel import of_release
from dsv4doctor.facts.snapshot import read_snapshot, take, text_of
from dsv4doctor.models import (
    ARCHS,
    Declaration,
    GpuFacts,
    Kernel,
    KernelEvidence,
    Location,
    NativeLibrary,
    Package,
    SglangTree,
    Stack,
    StoredFormat,
    Verdict,
)
from dsv4doctor.rules.samples import MAIN_NVFP4_CUTLASS, MAIN_TRTLLM
from dsv4doctor.verdicts import judge, judge_kernel
from dsv4doctor.wheels import default_cache

_R, _F, _U = Verdict.RUNS, Verdict.FAILS, Verdict.UNKNOWN
_TRTLLM = "flashinfer.fused_moe.trtllm_fp4_block_scale_routed_moe"
_CUTLASS = "flashinfer.fused_moe.cutlass_fused_moe"
_MLA = "flashinfer.mla._sparse_mla_sm120.sparse_mla_sm120_decode_dsv4"


def _release(version: str) -> Grounds:
    return Grounds(of_release(version, default_cache()), version, missing="")


def _kinds(symbol: str, evidence: KernelEvidence) -> dict[str, tuple[str, ...]]:
    return {one.kind: one.admits for one in evidence.declarations if one.symbol == symbol}


@pytest.mark.wheels
def test_a_release_that_refuses_in_words() -> None:
    """0.6.17: JIT and launcher admit generation 12, the cubins do not."""
    found = _release("0.6.17")
    assert _kinds(_TRTLLM, found.evidence) == {
        "jit": ("10.x", "12.x"),
        "launcher": ("10.x", "12.x"),
        "cubins": ("10.0", "10.3", "10.7"),
    }
    assert _kinds(_CUTLASS, found.evidence) == {"jit": ("8.9", "9.0", "10.x", "11.x", "12.x")}
    assert _kinds(_MLA, found.evidence)["decorator"] == ("12.0", "12.1")
    layers = [judge(MAIN_TRTLLM[0], arch, grounds=found) for arch in ARCHS.values()]
    assert [layer.verdict for layer in layers] == [_F, _R, _R, _F, _F]
    assert "FlashInfer 0.6.17 picks prebuilt kernels for 10.0, 10.3" in layers[3].reason
    assert "no kernels runnable on sm120; this backend" in layers[3].reason
    assert "No supported CUDA architectures found for major versions [10, 12]" in layers[0].reason
    assert [judge_kernel(_MLA, arch, grounds=found)[0] for arch in ARCHS.values()] == [
        *(_F, _F, _F, _R, _R)
    ]


@pytest.mark.wheels
def test_a_release_that_fails_late() -> None:
    """0.6.15.post1 says nothing of its cubins: that is the table's, and so is the verdict."""
    found = _release("0.6.15.post1")
    assert "cubins" not in _kinds(_TRTLLM, found.evidence)
    layers = [judge(MAIN_TRTLLM[0], arch, grounds=found) for arch in ARCHS.values()]
    assert [layer.verdict for layer in layers] == [_F, _R, _R, _F, _F]
    assert 'expect "Error occurred when running GEMM!"' in layers[3].reason
    assert "table of known kernels" in layers[3].reason
    assert "only launches prebuilt kernels" in layers[1].reason
    cutlass = judge(MAIN_NVFP4_CUTLASS[0], ARCHS["sm_120"], "moe()", found)
    assert cutlass.verdict is _R
    assert "FlashInfer 0.6.15.post1 compiles it for 8.9, 9.0, 10.x, 11.x, 12.x" in cutlass.reason


@pytest.mark.wheels
def test_a_yes_of_flashinfer_does_not_settle_how_it_is_called() -> None:
    """cutlass_fused_moe is compiled for sm_120; whether this use of it is there is the table's."""
    found = _release("0.6.17")
    unknown = judge(
        replace(MAIN_TRTLLM[0], quant_method="NewMoEMethod", kernel=Kernel(_CUTLASS, None)),
        ARCHS["sm_120"],
        "",
        found,
    )
    assert unknown.verdict is _U
    assert "how it is called decides" in unknown.reason


def test_a_release_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UndeterminedError, match="not a version"):
        of_release("new", tmp_path)


# ------------------------------------------------------------------------------ any tree


def _package(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / "flashinfer" / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (root / "flashinfer" / "init.py").rename(root / "flashinfer" / "__init__.py")
    return root / "flashinfer"


_CORE = """
from .jit import gen_module
_CCS = frozenset([120, 121])
@supported_compute_capability(_CCS)
def _check(x): ...
@backend_requirement({"one": _check})
def checked(x): ...
def jitted(x):
    from .jit import gen_other
    return gen_module().run(x), gen_other()
def silent(x): ...
@supported_compute_capability(from_somewhere())
def odd(x): ...
"""
_JIT = """
raise SystemExit("imported")
def gen_module(): return spec(flags(supported_major_versions=[9, 12]))
def gen_other(): return gen_deeper()
def gen_deeper(): return spec(sm120a_nvcc_flags)
def gen_loop(): return gen_loop()
"""


def test_what_a_tree_says_is_read_and_never_run(tmp_path: Path) -> None:
    root = _package(
        tmp_path, init="", gemm="from .core import checked, jitted, silent, odd, gone\n",
        core=_CORE, jit=_JIT,
    )  # fmt: skip
    said = sorted(
        (one.symbol.rpartition(".")[2], one.kind, one.admits) for one in read_declarations(root)
    )
    assert said == [
        ("checked", "decorator", ("12.0", "12.1")),
        ("jitted", "jit", ("12.0",)),
        ("jitted", "jit", ("9.x", "12.x")),
    ]


@pytest.mark.parametrize("text", ["def f(:", "\0", "x = " + "(" * 3000, "from . import *\n"])
def test_a_tree_that_is_none_says_nothing(text: str, tmp_path: Path) -> None:
    root = _package(tmp_path, init="", gemm=text)
    assert read_declarations(root) == ()
    assert read_declarations(tmp_path / "gone") == ()


_PREBUILT = """
from .artifacts import ArtifactPath
def gen_x():
    get_artifact(ArtifactPath.BMM)
    return spec(csrc / "trtllm_runner.cu", flags(supported_major_versions=[10, 12]))
"""
_LISTED = (
    "0f031a  Bmm_Bfloat16_t128x128x64_clmp_dynB_sm100f.cubin\n"
    "9b43cc  Bmm_E2m1_E2m1E2m1_Fp32_t128x64x256_dynB_sm103a.cubin\n"
    "77aa01  include/sm120.h\n"
)


def test_prebuilt_kernels_that_are_installed_settle_it(tmp_path: Path) -> None:
    """JIT and launcher admit sm_120, the kernels beside them do not: as in FlashInfer 0.6.12."""
    root = _package(
        tmp_path, init="", fused_moe="from .jit import gen_x\ndef moe(): return gen_x()\n",
        artifacts='class ArtifactPath:\n    BMM: str = "1a2b/batched_gemm/"\n', jit=_PREBUILT,
    )  # fmt: skip
    source = root / "data" / "csrc" / "trtllm_runner.cu"
    source.parent.mkdir(parents=True)
    source.write_text(
        'CHECK(major == 10 || major == 12) << 1;\n"Error occurred when running GEMM!"\n'
    )
    folder = tmp_path / "flashinfer_cubin" / "cubins" / "1a2b" / "batched_gemm"
    folder.mkdir(parents=True)
    (folder / "checksums.txt").write_text(_LISTED)

    def judged(cubins: Path | None) -> list[bool | None]:
        evidence = KernelEvidence("0.6.12", None, read_declarations(root, cubins))
        found = [of_kernel("flashinfer.fused_moe.moe", arch, evidence) for arch in ARCHS.values()]
        if cubins is not None:
            assert found[3] is not None
            assert found[3].source.startswith("FlashInfer 0.6.12 has prebuilt kernels for 10.0, 10")
            assert found[3].refusal == "Error occurred when running GEMM!"
        return [one.exists if one else None for one in found]

    assert judged(folder.parent.parent) == [False, True, True, False, False]
    assert judged(None) == [False, None, None, None, None]
    (folder / "checksums.txt").write_text("nothing\n")
    assert read_declarations(root, folder.parent.parent) == read_declarations(root, None)


@pytest.mark.parametrize("path", ["../../etc/", "/etc/", "gone/"])
def test_an_artifact_is_not_looked_for_elsewhere(path: str, tmp_path: Path) -> None:
    (tmp_path / "checksums.txt").write_text(_LISTED)
    assert manifest.manifest(tmp_path / "x" / "y", path) is None


def test_pipes_and_links_in_circles_are_not_waited_for(tmp_path: Path) -> None:
    folder = tmp_path / "flashinfer"
    (folder / "data" / "csrc").mkdir(parents=True)
    for name in ("__init__.py", "gemm.py", "artifacts.py"):
        os.mkfifo(folder / name)
    (folder / "jit").symlink_to(folder)
    (tmp_path / "sgl_kernel").mkdir()
    os.mkfifo(tmp_path / "sgl_kernel" / "ops.so")
    (tmp_path / "sgl_kernel" / "again").symlink_to(tmp_path / "sgl_kernel")
    folders = {name: str(tmp_path / name) for name in ("flashinfer", "flashinfer_cubin")}
    found = gather({**folders, "sgl_kernel": str(tmp_path / "sgl_kernel")}, {}, tmp_path / "cache")
    assert found.declarations == ()
    assert found.flashinfer_problem == "its sources say nothing of the GPUs they are for"
    assert [(one.path, one.problem) for one in found.libraries] == [
        ("sgl_kernel/ops.so", "not a regular file")
    ]


def test_several_backends_are_a_no_together_and_never_a_yes(tmp_path: Path) -> None:
    """FlashInfer 0.6.12's mm_fp4: sm_120 has backends, and trtllm is none of them."""
    root = _package(
        tmp_path, init="", gemm="from .core import checked, chosen\n", jit=_JIT,
        core=_CORE + "def chosen(x, backend): return gen_module().run(x)\n",
    )  # fmt: skip
    evidence = KernelEvidence("0.6.12", None, read_declarations(root))

    def exists(name: str) -> list[bool | None]:
        found = [of_kernel(f"flashinfer.gemm.{name}", arch, evidence) for arch in ARCHS.values()]
        return [one.exists if one else None for one in found]

    assert exists("checked") == [False, False, False, None, None]
    assert exists("chosen") == [None] * 5


def test_launcher_and_cubins_in_a_source() -> None:
    text = (
        "TVM_FFI_ICHECK_EQ(major, 10) << 1;\n"
        'TVM_FFI_ICHECK(major == 10 || major == 12)\n    << "no";\n'
        "bool isArchCompatible(int smVersion, int cubin) {\n"
        "  return smVersion == 100 || smVersion == 103;\n}\n"
        'msg << "none for sm" << sm_version << "; sorry";\n'
    )
    launcher, cubins = cuda_source.said(text)
    assert (launcher.admits, launcher.line) == (("10.x", "12.x"), 2)
    assert (cubins.admits, cubins.line, cubins.refusal) == (
        ("10.0", "10.3"), 4, "none for sm{sm}; sorry",
    )  # fmt: skip
    assert cuda_source.said("nothing") == ()


# ------------------------------------------------------------------------------ libraries


def _libraries() -> tuple[NativeLibrary, ...]:
    path = Path(__file__).parent / "data" / "sglang_kernel-0.4.5.json"
    return tuple(
        NativeLibrary(row["path"], tuple(row["cubins"]), tuple(row["ptx"]), tuple(row["ops"]))
        for row in json.loads(path.read_text(encoding="utf-8"))
    )


def test_a_library_without_code_for_the_gpu_fails_and_one_with_it_proves_nothing() -> None:
    found = Grounds(KernelEvidence(libraries=_libraries()))
    symbol = "torch.ops.sgl_kernel.sparse_decode_fwd"
    verdicts = [judge_kernel(symbol, arch, grounds=found) for arch in ARCHS.values()]
    assert [verdict for verdict, _ in verdicts] == [_U, _U, _U, _F, _F]
    assert "flashmla_ops.abi3.so, which holds it, has code for 90a, 100a, 103a" in verdicts[3][1]
    assert "no kernel image is available" in verdicts[3][1]
    common = judge_kernel("sgl_kernel.moe_align_block_size", ARCHS["sm_121"], grounds=found)
    assert common[0] is _F
    assert "sm100/common_ops.abi3.so" in common[1]
    here = judge_kernel("sgl_kernel.moe_align_block_size", ARCHS["sm_120"], grounds=found)
    assert here[0] is _U
    assert judge_kernel("sgl_kernel.not_there", ARCHS["sm_120"], grounds=found)[0] is _U


def test_silence_is_never_a_yes() -> None:
    for symbol in (_TRTLLM, "flashinfer.new.thing", "sgl_kernel.thing", "deep_gemm.thing"):
        assert of_kernel(symbol, ARCHS["sm_100"], KernelEvidence()) is None
    assert judge_kernel("flashinfer.new.thing", ARCHS["sm_100"], grounds=Grounds())[0] is _U


# ------------------------------------------------------------------------------ whose evidence


def _tree(root: Path, origin: str, pin: str) -> SglangTree:
    info = root / "sglang-0.5.23.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.23\nRequires-Dist: {pin}\n"
    )
    return SglangTree(str(root), "0.5.23", origin)


def test_evidence_counts_for_the_sglang_that_requires_it(tmp_path: Path) -> None:
    evidence = KernelEvidence("0.7.2")
    stack = Stack("python", "3.12", (Package("flashinfer-python", "0.7.2", None, None),), evidence)
    pinned = _tree(tmp_path, "wheel", "flashinfer_python[cu13]==0.7.2")
    assert grounds(stack, pinned) == Grounds(evidence, "0.7.2", missing="")
    mute = replace(stack, evidence=KernelEvidence("0.7.2", "its sources say nothing"))
    assert grounds(mute, pinned).missing == "of FlashInfer 0.7.2 its sources say nothing"
    other = grounds(stack, _tree(tmp_path, "wheel", "flashinfer_python[cu13]==0.6.17"))
    assert (other.flashinfer, other.evidence.flashinfer) == ("0.6.17", None)
    assert other.missing == (
        "FlashInfer 0.7.2 in this interpreter is another one, SGLang 0.5.23 pins 0.6.17"
    )
    beside = grounds(stack, _tree(tmp_path, "installed", "flashinfer_python[cu13]==0.6.17"))
    assert beside.flashinfer == "0.7.2"
    bare = grounds(Stack("python", "3.12", ()), pinned)
    assert bare.missing.startswith("no FlashInfer in this interpreter, SGLang 0.5.23 pins")
    assert grounds(None, pinned).missing.startswith("no packages were read")


def test_a_snapshot_carries_the_evidence(tmp_path: Path) -> None:
    at = Location("flashinfer/jit/fused_moe.py", 284)
    said = Declaration(_TRTLLM, "jit", ("10.x", "12.x"), at, prebuilt=True, refusal="no")
    evidence = KernelEvidence("0.7.2", None, (said,), _libraries())
    stack = Stack("python", "3.12", (), evidence)
    taken = take(
        gpu=GpuFacts(()), sglang=None, stack=stack, checkpoint=None, launch=None, environment={}
    )
    path = tmp_path / "box.json"
    path.write_text(text_of(taken))
    read = read_snapshot(path).stack
    assert read is not None
    assert read.evidence == evidence
    plain = json.loads(path.read_text())
    del plain["stack"]["evidence"]  # one of an older dsv4doctor
    path.write_text(json.dumps(plain))
    older = read_snapshot(path).stack
    assert older is not None
    assert older.evidence == KernelEvidence()


def test_the_table_names_the_error_of_the_pinned_flashinfer() -> None:
    layer = replace(MAIN_TRTLLM[0], stored_format=StoredFormat.NVFP4)

    def reason(version: str, arch: str) -> str:
        return judge(layer, ARCHS[arch], "", Grounds(flashinfer=version)).reason

    assert 'expect "Error occurred when running GEMM!"' in reason("0.6.15.post1", "sm_120")
    assert "no kernels runnable on sm121" in reason("0.6.17", "sm_121")
    assert "major versions [10, 12]" in reason("0.7.2", "sm_90")
    assert "expect" not in reason("odd", "sm_120")


def test_reading_an_interpreter_imports_nothing_of_it(tmp_path: Path) -> None:
    """find_spec of a top-level package runs nothing; its folder is what is read."""
    package = _package(tmp_path, init="raise SystemExit('imported')\n", gemm=_CORE, jit=_JIT)
    program = (
        "import sys; from pathlib import Path; from dsv4doctor.facts.stack import read_stack\n"
        f"stack, _ = read_stack(Path(sys.executable), {{'PYTHONPATH': {str(tmp_path)!r}}})\n"
        "print(len(stack.evidence.declarations))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={"DSV4DOCTOR_CACHE": str(tmp_path / "cache"), "PATH": "/usr/bin:/bin"},
    )
    assert ended.stdout.strip() == "3", ended.stderr
    assert package.is_dir()
    assert list((tmp_path / "cache" / "evidence").glob("flashinfer-*.json"))
