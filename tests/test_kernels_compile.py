"""Every configuration of every kernel fits the GPUs that it is offered on."""

import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsv4doctor.errors import UsageError
from dsv4doctor.kernels import registry
from dsv4doctor.kernels.compile import SHARED_LIMIT_BYTES, Compiled, compile_all, parse_archs
from dsv4doctor.kernels.cubin import CubinError, instructions, resources

TINY = str(Path(__file__).parent / "data" / "tiny_kernels.py")


def run(sources: list[str], archs: list[str], processes: int = 2) -> list[Compiled]:
    count, *results = compile_all(sources, archs, processes)
    assert isinstance(count, int)
    assert len(results) == count
    return [result for result in results if isinstance(result, Compiled)]


@pytest.fixture(scope="module")
def tiny() -> dict[tuple[str, str], Compiled]:
    """The small kernel's results by (case, arch), compiled for every arch."""
    return {(r.case, r.arch): r for r in run([TINY], list(SHARED_LIMIT_BYTES))}


@pytest.mark.parametrize("arch", SHARED_LIMIT_BYTES)
def test_a_fitting_configuration(tiny: dict[tuple[str, str], Compiled], arch: str) -> None:
    good = tiny["good", arch]
    assert (good.status, good.detail) == ("ok", "")
    assert 16 < good.registers <= 255
    assert good.stack_bytes == good.spill_instructions == good.static_shared_bytes == 0
    # Two stages of 64x64 bf16 for both operands are the least that can be in flight.
    assert 2 * 2 * 64 * 64 * 2 <= good.dynamic_shared_bytes <= good.shared_limit_bytes
    expected = {"sm_90": "HGMMA", "sm_100": "UTCHMMA", "sm_103": "UTCHMMA"}.get(arch, "HMMA")
    assert set(good.mma) == {expected}


@pytest.mark.parametrize("arch", ["sm_90", "sm_120", "sm_121"])
def test_spills_are_seen(tiny: dict[tuple[str, str], Compiled], arch: str) -> None:
    spilling = tiny["spilling", arch]
    assert spilling.status == "spills"
    assert not spilling.passed
    assert spilling.stack_bytes > 0
    assert spilling.spill_instructions > 0
    assert spilling.registers == 255


def test_too_much_shared_memory_is_seen(tiny: dict[tuple[str, str], Compiled]) -> None:
    oversized = tiny["oversized", "sm_120"]
    assert oversized.status == "does not fit"
    assert not oversized.passed
    assert oversized.shared_bytes > 101376
    assert str(oversized.shared_bytes) in oversized.detail


def test_withheld_is_told_and_not_compiled(tiny: dict[tuple[str, str], Compiled]) -> None:
    assert tiny["withheld", "sm_120"].status == "ok"
    withheld = tiny["withheld", "sm_121"]
    assert (withheld.status, withheld.detail, withheld.registers) == (
        "withheld",
        "just not here",
        0,
    )
    assert withheld.passed


def test_an_arch_that_a_kernel_is_not_offered_on(tmp_path: Path) -> None:
    narrow = tmp_path / "narrow.py"
    text = Path(TINY).read_text()
    narrow.write_text(text.replace("error_bar=0.01,", 'error_bar=0.01, archs=("sm_120",),'))
    (result,) = run([str(narrow)], ["sm_90"], 1)
    assert (result.status, result.detail) == ("withheld", "the kernel is not offered on sm_90")


def test_a_file_that_does_not_load_is_a_failure(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("import nothing_of_that_name\n")
    (result,) = run([str(broken)], ["sm_120"], 1)
    assert (result.operation, result.status) == ("broken", "failed")
    assert "nothing_of_that_name" in result.detail


def test_a_configuration_that_does_not_compile_is_a_failure(tmp_path: Path) -> None:
    text = Path(TINY).read_text().replace('"out": "*fp32"', '"out": "*fp32", "nobody": "i32"')
    wrong = tmp_path / "wrong.py"
    wrong.write_text(text)
    results = run([str(wrong)], ["sm_120"], 1)
    assert {r.status for r in results} == {"failed"}
    assert "nobody" in results[0].detail


@pytest.mark.parametrize("name", registry.OPERATIONS)
def test_registered_kernels_fit_sm_120_and_sm_121(name: str) -> None:
    results = run([name], ["sm_120", "sm_121"])
    assert {r.arch for r in results if r.status != "withheld"} == {"sm_120", "sm_121"}
    bad = [f"{r.case} on {r.arch}: {r.status}, {r.detail}" for r in results if not r.passed]
    assert bad == []


def test_arch_lists() -> None:
    assert parse_archs("sm_120, sm_121,sm_120") == ("sm_120", "sm_121")
    for text in ("", "sm_12", "sm_120,ampere"):
        with pytest.raises(UsageError, match="--arch"):
            parse_archs(text)


def elf(*sections: tuple[str, bytes], machine: int = 190) -> bytes:
    """A minimal ELF file with these sections."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name, _ in sections) + b".names\0"
    body = b"".join(content for _, content in sections) + names
    rows, name_at, at = [bytes(64)], 1, 64
    for name, content in (*sections, (".names", names)):
        rows.append(struct.pack("<IIQQQQ24x", name_at, 1, 0, 0, at, len(content)))
        name_at += len(name) + 1
        at += len(content)
    header = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack(
        "<HHIQQQIHHHHHH", 2, machine, 1, 0, 0, 64 + len(body), 0x900780A, 64, 0, 0, 64, len(rows),
        len(rows) - 1,
    )  # fmt: skip
    return header + body + b"".join(rows)


def test_the_tables_of_a_cubin() -> None:
    info = struct.pack("<BBHII", 4, 0x2F, 8, 1, 77) + struct.pack("<BBHII", 4, 0x11, 8, 1, 48)
    lone = struct.pack("<BBH", 3, 0x50, 5)
    read = resources(
        elf((".text.k", b"code"), (".nv.info", lone + info), (".nv.shared.k", bytes(1536)))
    )
    assert (read.kernel, read.registers, read.stack_bytes, read.static_shared_bytes) == (
        "k",
        77,
        48,
        512,
    )


@pytest.mark.parametrize(
    "data",
    [b"", b"PTX", elf((".nv.info", b"")), elf((".text.k", b"")), elf(machine=62), elf()[:100]],
    ids=["empty", "other file", "no kernel", "no info", "other machine", "cut off"],
)
def test_what_is_no_cubin(data: bytes) -> None:
    with pytest.raises(CubinError):
        resources(data)


def test_a_disassembler_that_is_not_there() -> None:
    with pytest.raises(CubinError, match="no-such-program"):
        instructions(elf(), "/no-such-program")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_what_is_interrupted_leaves_no_compiler_behind(number: signal.Signals) -> None:
    program = (
        "import multiprocessing, signal\n"
        "from dsv4doctor.kernels import catalog, compile\n"
        "if __name__ == '__main__':\n"
        "    signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "    results = compile.compile_all(catalog.select(()), ['sm_120'], 2)\n"
        "    next(results)\n"
        "    print(*(child.pid for child in multiprocessing.active_children()), flush=True)\n"
        "    list(results)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    children = [int(word) for word in process.stdout.readline().split()]
    assert len(children) == 2
    time.sleep(1)
    process.send_signal(number)
    assert process.wait(20) != 0
    process.stdout.close()
    deadline = time.monotonic() + 20
    while any(_runs(pid) for pid in children):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except OSError:
        return False
