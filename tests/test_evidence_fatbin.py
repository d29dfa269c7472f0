"""The architectures in native libraries: real ones with known targets, and damaged ones."""

import lzma
import os
import re
import struct
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4doctor.evidence.archs import admits, holds_code_for
from dsv4doctor.evidence.fatbin import library_in, read_library
from dsv4doctor.models import ARCHS, NativeLibrary

_DATA = Path(__file__).parent / "data"
_TARGETS = {
    "a": (("90a", "100a", "120a"), ("120a",)),
    "f": (("100f", "120f"), ("103f",)),
    "plain": (("80", "90"), ("120",)),
}


def _image(name: str) -> bytes:
    return lzma.decompress((_DATA / f"fatbin_{name}.so.xz").read_bytes())


@pytest.mark.parametrize("name", _TARGETS)
def test_targets_that_a_library_was_built_for(name: str, tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(_image(name))
    library = read_library(path)
    assert (library.cubins, library.ptx) == _TARGETS[name]
    assert library.problem is None


@pytest.mark.parametrize("name", _TARGETS)
def test_cuobjdump_lists_the_same(name: str, tmp_path: Path) -> None:
    """Triton's wheel has one; it prints family targets without their letter."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    assert tool.is_file()
    path = tmp_path / "lib.so"
    path.write_bytes(_image(name))
    said = subprocess.run([tool, path], capture_output=True, text=True, check=True).stdout
    library = read_library(path)
    for kind, targets in (("elf", library.cubins), ("ptx", library.ptx)):
        listed = set(re.findall(rf"Fatbin {kind} code:\n=+\narch = sm_(\w+)", said))
        assert listed == {target.rstrip("f") for target in targets}


def test_which_gpus_run_what_is_in_a_library() -> None:
    def running(cubins: tuple[str, ...] = (), ptx: tuple[str, ...] = ()) -> list[str]:
        library = NativeLibrary("x.so", cubins, ptx)
        return [name for name, arch in ARCHS.items() if holds_code_for(library, arch)]

    assert running(("120a",)) == ["sm_120"]
    assert running(("120",)) == running(("120f",)) == ["sm_120", "sm_121"]
    assert running(("100f",)) == ["sm_100", "sm_103"]
    assert running(("103a",)) == ["sm_103"]
    assert running(("80", "89")) == []
    assert running(("121a",)) == ["sm_121"]
    assert running(ptx=("80",)) == list(ARCHS)
    assert running(ptx=("100",)) == ["sm_100", "sm_103", "sm_120", "sm_121"]
    assert running(ptx=("90a",)) == ["sm_90"]
    assert running(ptx=("100f",)) == ["sm_100", "sm_103"]
    assert running() == []


def test_capabilities_and_generations() -> None:
    assert admits(["12.x"], ARCHS["sm_121"])
    assert admits(["12.1"], ARCHS["sm_121"])
    assert not admits(["12.0"], ARCHS["sm_121"])
    assert not admits(["1.x"], ARCHS["sm_120"])
    assert not admits([], ARCHS["sm_120"])


# ------------------------------------------------------------------------------ damaged


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "empty"),
        (b"#!/bin/sh\n", "not an ELF file"),
        (b"\x7fELF", "not a 64-bit ELF file"),
        (b"\x7fELF" + bytes(100), "not a 64-bit ELF file"),
        (b"\x7fELF\x02\x01" + bytes(100), "no usable section table"),
    ],
)
def test_no_library(content: bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(content)
    assert read_library(path) == NativeLibrary(str(path), problem=problem)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "No such file" in str(read_library(tmp_path / "gone.so").problem)
    assert read_library(tmp_path).problem == "not a regular file"
    os.mkfifo(tmp_path / "pipe.so")
    assert read_library(tmp_path / "pipe.so").problem == "not a regular file"


def test_truncated_library_says_so(tmp_path: Path) -> None:
    image = _image("a")
    for length in (100, len(image) // 2, len(image) - 1):
        library = library_in(image[:length], "lib.so")
        assert library.problem is not None
        assert library.problem.startswith(("truncated", "no usable"))


def test_fat_binary_larger_than_its_section_is_damaged() -> None:
    image = bytearray(_image("plain"))
    at = image.find(struct.pack("<I", 0xBA55ED50))
    struct.pack_into("<Q", image, at + 8, 1 << 40)
    assert "larger than its section" in str(library_in(bytes(image), "lib.so").problem)
    image = bytearray(_image("plain"))
    struct.pack_into("<Q", image, at + 16 + 8, 1 << 40)
    assert "larger than its fat binary" in str(library_in(bytes(image), "lib.so").problem)


@settings(max_examples=150, deadline=None)
@given(
    changes=st.lists(st.tuples(st.integers(0, 40_000), st.integers(0, 255)), max_size=40),
    keep=st.integers(0, 40_000),
)
def test_any_damage_gives_an_answer(changes: list[tuple[int, int]], keep: int) -> None:
    image = bytearray(_image("f"))
    for at, value in changes:
        image[at % len(image)] = value
    library = library_in(bytes(image[:keep]), "lib.so")
    # A length of nought would run for ever; anything else ends in targets or in a reason.
    assert library.problem is not None or all(int(t.rstrip("af")) for t in library.cubins)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=400))
def test_any_bytes_are_no_library_or_an_empty_one(content: bytes) -> None:
    library = library_in(b"\x7fELF\x02\x01" + content, "lib.so")
    assert library.cubins == () or library.problem is None
