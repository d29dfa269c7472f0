"""Known failures are found by kind, told apart, ranked, and healthy logs are left alone."""

from __future__ import annotations

import re

import pytest
from log_writer import ARGUMENTS_0514, healthy, traffic

from dsv4doctor.diagnose.judge import Diagnosis, judge
from dsv4doctor.diagnose.scan import GATES, Scanner
from dsv4doctor.diagnose.signature import LogExample, Signature, signatures
from dsv4doctor.rules import RULES

_EXAMPLES = [(entry, example) for entry in signatures() for example in entry.examples]
_CASES = [
    pytest.param(entry, example, id=f"{entry.id}-{example.title}") for entry, example in _EXAMPLES
]


def read(text: str | bytes, arch: str | None = None) -> Diagnosis:
    scanner = Scanner(signatures())
    data = text.encode() if isinstance(text, str) else text
    for start in range(0, len(data), 1 << 20):
        part = data[start : start + (1 << 20)]
        scanner.feed(part if part.endswith(b"\n") else part + b"\n")
    return judge(scanner.finish(), "log", arch, ())


def found(diagnosis: Diagnosis) -> list[str]:
    return [match.signature.id for match in diagnosis.matches]


# ------------------------------------------------------------------------------ the data


@pytest.mark.parametrize(("signature", "example"), _CASES)
def test_example(signature: Signature, example: LogExample) -> None:
    matches = [match for match in read(example.text).matches if match.signature.id == signature.id]
    assert bool(matches) is example.matches
    if matches:
        assert {name: matches[0].fields.get(name) for name in example.fields} == example.fields
        assert example.top in matches[0].causes[0].text


@pytest.mark.parametrize(("signature", "example"), _CASES)
def test_example_in_other_clothes(signature: Signature, example: LogExample) -> None:
    """The same lines from Kubernetes, on other ranks, after much traffic, still speak."""
    noise = list(traffic(300, seed=2))
    dressed = [
        f"2026-11-29T14:00:00.123456789Z stderr F \x1b[31m{line}\x1b[0m\r"
        for line in [*noise, *example.text.strip().splitlines()]
    ]
    ids = found(read("\n".join(dressed) + "\n"))
    assert (signature.id in ids) is example.matches


def test_every_signature_is_complete() -> None:
    ids = [entry.id for entry in signatures()]
    rules = {rule.id for rule in RULES}
    assert len(ids) == len(set(ids))
    for entry in signatures():
        assert any(example.matches for example in entry.examples), entry.id
        assert all(0 < cause.prior <= 0.95 and cause.remedy for cause in entry.causes), entry.id
        assert set(entry.rules) <= rules, entry.id
        assert all(link.startswith("https://") for link in entry.links), entry.id
        for literal in entry.literals:
            assert any(gate.decode() in literal for gate in GATES), (entry.id, literal)


def test_patterns_are_bounded() -> None:
    unbounded = re.compile(r"(?<!\\)(?:\.|\]|\)|\\[wsSd])[*+]")
    for entry in signatures():
        signs = [sign for cause in entry.causes for sign in (*cause.confirms, *cause.refutes)]
        patterns = [*entry.patterns, *entry.near, *entry.absent, *(sign.pattern for sign in signs)]
        for pattern in patterns:
            assert not unbounded.search(re.sub(r"\^\w+ \S*|\\S\*", "", pattern.pattern)), pattern


# ------------------------------------------------------------------------------ controls


@pytest.mark.parametrize("release", ["0.5.12.post1", "0.5.14", "0.5.18", "0.5.19", "0.5.23"])
@pytest.mark.parametrize("gpu", ["NVIDIA RTX PRO 6000 Blackwell Server Edition", "NVIDIA B200"])
def test_healthy_log(release: str, gpu: str) -> None:
    diagnosis = read(healthy(release, gpu))
    assert found(diagnosis) == []
    assert diagnosis.unexplained == ()
    assert diagnosis.exit_code == 0
    assert diagnosis.facts.sglang == release
    assert diagnosis.facts.arch == ("sm_120" if "PRO" in gpu else "sm_100")


def test_trtllm_lines_without_a_gpu_are_only_a_note() -> None:
    line = (
        "[2026-09-18 10:01:19 TP0 EP0] Shuffling FP4 expert weights for TRT-LLM MxFP4 kernel "
        "(layer: model.decoder.mlp.experts)...\n"
    )
    unknown = read(line)
    assert (found(unknown), unknown.exit_code) == ([], 0)
    assert "a failure on any other GPU" in unknown.notes[0]
    assert "--arch" in unknown.notes[0]
    assert found(read(line, "sm_120")) == ["LOG101"]
    assert read(line, "sm_100").notes == ()


def test_unknown_gpu_and_an_error_that_nothing_else_explains() -> None:
    line = (
        "[2026-09-18 10:01:19] Use flashinfer_trtllm_routed as MoE runner backend for "
        "DeepseekV4ForCausalLM hybrid FP8+NVFP4 checkpoint.\n"
    )
    unexplained = read(line + "RuntimeError: CUDA error: unspecified launch failure\n")
    assert found(unexplained) == ["LOG102"]
    assert unexplained.matches[0].causes[0].confidence != "low"
    assert "--arch" in unexplained.notes[0]
    explained = read(line + "torch.OutOfMemoryError: CUDA out of memory.\n")
    assert found(explained) == ["LOG507"]


def test_main_experts_of_the_same_method_are_not_called_draft() -> None:
    line = (
        "[2026-09-18 10:01:19] Shuffling FP4 expert weights for TRT-LLM MxFP4 kernel (layer: "
        "model.layers.3.mlp.experts)...\n"
    )
    assert found(read(line, "sm_120")) == []


# ------------------------------------------------------------------------------ telling apart

_SENTENCE = "RuntimeError: No supported CUDA architectures found for major versions {}.\n"


@pytest.mark.parametrize(
    ("majors", "expected"),
    [
        ("[12]", "LOG401"),
        ("[9, 10, 12]", "LOG401"),
        ("[10]", "LOG402"),
        ("[9]", "LOG402"),
        ("[10, 11]", "LOG402"),
    ],
)
def test_same_sentence_different_cause(majors: str, expected: str) -> None:
    assert found(read(_SENTENCE.format(majors), "sm_120")) == [expected]


def test_cause_of_the_sentence_turns_with_the_gpu() -> None:
    on_sm120 = read(_SENTENCE.format("[10]"), "sm_120").matches[0].causes[0]
    on_sm100 = read(_SENTENCE.format("[10]"), "sm_100").matches[0].causes[0]
    assert "newer nvcc does not help" in on_sm120.text
    assert "nvcc too old" in on_sm100.text
    assert on_sm100.seen_for
    assert on_sm120.confidence == "high"


_FRAMES = """[2026-09-18 10:02:40 TP2 EP2] Scheduler: Traceback (most recent call last):
  File "/x/sglang/srt/models/{model}.py", line 77, in forward
    hidden = self.decoder(hidden)
  File "/x/sglang/srt/layers/quantization/mxfp4_flashinfer_trtllm_moe.py", line 9, in apply
    out = kernel(
RuntimeError: The trtllm-gen batched GEMM cubin manifest contains no kernels runnable on sm120; this
"""


@pytest.mark.parametrize(
    ("model", "role"), [("deepseek_v4_nextn", "draft"), ("deepseek_v4", "main"), ("other", None)]
)
def test_role_follows_the_frames(model: str, role: str | None) -> None:
    match = read(_FRAMES.format(model=model)).matches[0]
    assert (match.role, match.line.rank) == (role, "TP2 EP2")
    assert match.sighting.traceback is not None
    assert match.sighting.traceback.rank == "TP2 EP2"
    assert [frame.line for frame in match.sighting.traceback.frames] == [77, 9]


def test_first_and_ranks() -> None:
    log = healthy("0.5.18") + "".join(
        f"[2026-11-29 15:00:0{rank} TP{rank}] DSpark V4 draft: unexpected weight "
        f"'mtp.0.ffn.experts.{rank}.w1.scale' -> 'stages.0.mlp.experts.{rank}.w1.scale'\n"
        for rank in range(8)
    )
    diagnosis = read(log)
    match = diagnosis.matches[0]
    assert (match.signature.id, match.count, len(match.ranks)) == ("LOG301", 8, 8)
    assert len(match.values["tensor"]) == 8
    assert diagnosis.first is not None
    assert diagnosis.first.rank == "TP0"
    assert diagnosis.first.number == match.line.number == log.count("\n") - 7
    assert "the SGLang in the log excludes" in match.causes[0].seen_against[0]


def test_root_stands_before_its_consequences() -> None:
    log = (
        _FRAMES.format(model="deepseek_v4")
        + "[2026-09-18 10:02:41] SIGQUIT received. signum=<Signals.SIGQUIT: 3>, frame=None.\n"
        + "torch.AcceleratorError: CUDA error: an illegal memory access was encountered\n"
    )
    assert found(read(log)) == ["LOG104", "LOG506", "LOG590"]


def test_illegal_access_after_the_start_is_not_blamed_on_capture() -> None:
    crash = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered\n"
    short = "\n".join(healthy("0.5.17").splitlines()[:20]) + "\n"
    assert found(read(short + crash)) == ["LOG506"]
    assert found(read(short[: short.index("Capture cuda graph end")] + "\n" + crash)) == ["LOG505"]


def test_experts_of_the_wrong_method_are_blamed_for_a_failure_in_it() -> None:
    log = (
        "[2026-09-18 10:01:19] Shuffling FP4 expert weights for TRT-LLM MxFP4 kernel (layer: "
        "stages.0.mlp.experts)...\n"
        + _FRAMES.format(model="deepseek_v4_dspark").rpartition("RuntimeError")[0]
        + "RuntimeError: CUDA error: unspecified launch failure\n"
    )
    assert found(read(log)) == ["LOG101"]
    assert found(read("NVIDIA B200\n" + log)) == []
    assert read("NVIDIA B200\n" + log).exit_code == 3


def test_launch_arguments_speak_for_a_cause() -> None:
    log = f"[2026-11-29 14:00:00] {ARGUMENTS_0514}\nAssertionError: Hidden size mismatch\n"
    cause = read(log).matches[0].causes[0]
    assert "the logged runner backend is not an FP4 one" in cause.seen_for


# ------------------------------------------------------------------------------ other engines


def test_other_engine_is_named_and_shared_causes_still_found() -> None:
    log = (
        "(APIServer pid=1) INFO 06-23 08:00:00 [api_server.py:1990] vLLM API server version 0.26\n"
        "(EngineCore_DP0 pid=9) ERROR 06-23 08:01:02 [core.py:986] NotImplementedError: No NvFp4 "
        "MoE backend supports the deployment configuration.\n"
        "(EngineCore_DP0 pid=9) nvcc fatal   : Unsupported gpu architecture 'compute_121a'\n"
    )
    diagnosis = read(log)
    assert diagnosis.facts.engine == "vllm"
    assert found(diagnosis) == ["LOG105", "LOG403"]
    assert diagnosis.matches[0].line.rank == "EngineCore_DP0"
    trt = read("[TensorRT-LLM][ERROR] oops\nNIXL_ERR_BACKEND\n")
    assert (trt.facts.engine, found(trt)) == ("tensorrt-llm", ["LOG504"])


# ------------------------------------------------------------------------------ nothing known


def test_error_that_nothing_explains() -> None:
    log = healthy("0.5.23") + (
        "[2026-11-29 15:00:00 TP1] Scheduler hit an exception: Traceback (most recent call last):\n"
        '  File "/x/sglang/srt/managers/scheduler.py", line 1, in run\n    boom()\n'
        "ZeroDivisionError: division by zero\n"
    )
    diagnosis = read(log)
    assert diagnosis.exit_code == 3
    assert [line.text for line in diagnosis.unexplained][
        -1
    ] == "ZeroDivisionError: division by zero"
    assert diagnosis.first is not None
    assert diagnosis.first.rank == "TP1"


def test_the_end_of_a_child_without_its_error_is_an_error_that_nothing_explains() -> None:
    """The log shows that the server failed, and not why: that is not "nothing wrong"."""
    end = (
        "[2026-09-22 01:00:00] SIGQUIT received. signum=3, frame=None. It usually means one child\n"
    )
    diagnosis = read(healthy("0.5.23") + end)
    assert found(diagnosis) == ["LOG590"]
    assert diagnosis.exit_code == 3
    assert [line.text for line in diagnosis.unexplained] == [diagnosis.matches[0].line.text]
    assert diagnosis.first == diagnosis.matches[0].line
    explained = read(_FRAMES.format(model="deepseek_v4") + end)
    assert (explained.exit_code, explained.unexplained) == (1, ())


def test_a_draft_that_fails_is_not_told_to_take_a_flag() -> None:
    """LOG103 beside LOG101: both are about the draft of a hybrid checkpoint."""
    log = (
        "NVIDIA RTX PRO 6000 Blackwell Server Edition\n"
        "[2026-09-18 10:01:19 TP0] Shuffling FP4 expert weights for TRT-LLM MxFP4 kernel (layer: "
        "model.decoder.mlp.experts)...\n"
        + _FRAMES.format(model="deepseek_v4_nextn").rpartition("RuntimeError")[0]
        + "RuntimeError: Error occurred when running GEMM! (numBatches: 64, GemmMNK: 8 2048 4096, "
        "Kernel: bmm_E4m3_E2m1E4m3_Fp32_t128x8x512u2_dynBatch_sm100f)\n"
    )
    matches = {match.signature.id: match for match in read(log).matches}
    assert matches["LOG103"].role == "draft"
    best = matches["LOG103"].causes[0]
    assert best.confidence == "high"
    assert best.remedy.startswith("no flag changes it")
    assert matches["LOG103"].causes[1].confidence == "low"
