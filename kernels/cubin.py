"""Reads a cubin: registers, stack, shared memory, and the instructions that matter.

Sizes come from the ELF's own tables, instructions from NVIDIA's `nvdisasm`, which Triton's wheel
brings along.  Standard library only; no GPU.
"""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

RESERVED_SHARED_BYTES = 1024
"""From sm_90 on the system keeps 1 KiB per block, and a cubin counts it as the kernel's static
shared memory (measured: a kernel without any has 0 for sm_80 and 1024 for sm_90 and sm_120).
The per-block limits are meant without it."""

_REGISTERS, _FRAME = 0x2F, 0x11
_HAS_SIZE = 4
_ELF_CUDA = 190
_MMA = re.compile(r"\b(?:[HQOID]MMA|[HQIO]GMMA|UTC[A-Z]*MMA)\b")
_LOCAL = re.compile(r"\b(STL|LDL)\b")


class CubinError(ValueError):
    """The bytes are not a cubin, or the disassembler refused them."""


@dataclass(frozen=True)
class Resources:
    """What one kernel takes."""

    kernel: str
    registers: int
    """Per thread."""
    stack_bytes: int
    """Local memory per thread; a spilled register lives there."""
    static_shared_bytes: int
    """Per block, without what the system reserves."""


@dataclass(frozen=True)
class Instructions:
    """Counts over the text of a kernel, not over its run time."""

    mma: dict[str, int] = field(default_factory=dict)
    """Tensor-core opcode -> count, e.g. {"HMMA": 64}."""
    local_stores: int = 0
    local_loads: int = 0


def resources(cubin: bytes) -> Resources:
    """The resources of the one kernel in `cubin`.  Raises CubinError."""
    try:
        sections = _sections(cubin)
        kernel = next(name for name in sections if name.startswith(".text."))[len(".text.") :]
        info = _info(_content(cubin, sections[".nv.info"]))
    except (struct.error, IndexError, KeyError, StopIteration, UnicodeDecodeError) as error:
        raise CubinError(f"not a cubin with one kernel ({type(error).__name__})") from error
    shared = sections.get(f".nv.shared.{kernel}")
    size = shared[1] if shared else 0
    return Resources(
        kernel=kernel,
        registers=info.get(_REGISTERS, 0),
        stack_bytes=info.get(_FRAME, 0),
        static_shared_bytes=max(0, size - RESERVED_SHARED_BYTES),
    )


def _sections(elf: bytes) -> dict[str, tuple[int, int]]:
    """Section name -> (file offset, size)."""
    if elf[:5] != b"\x7fELF\x02" or struct.unpack_from("<H", elf, 18)[0] != _ELF_CUDA:
        raise CubinError("not a 64-bit CUDA ELF file")
    (table,) = struct.unpack_from("<Q", elf, 40)
    entry_size, count, names_index = struct.unpack_from("<HHH", elf, 58)
    rows = [struct.unpack_from("<IIQQQQ", elf, table + n * entry_size) for n in range(count)]
    names = rows[names_index][4]
    result = {}
    for row in rows:
        start = names + row[0]
        result[elf[start : elf.index(b"\0", start)].decode()] = (row[4], row[5])
    return result


def _content(elf: bytes, section: tuple[int, int]) -> bytes:
    return elf[section[0] : section[0] + section[1]]


def _info(table: bytes) -> dict[int, int]:
    """Attribute -> its value, for the attributes that hold (symbol, value)."""
    found: dict[int, int] = {}
    at = 0
    while at + 4 <= len(table):
        form, attribute, size = struct.unpack_from("<BBH", table, at)
        at += 4
        if form != _HAS_SIZE:
            continue  # the value is in the size's place
        if size == 8:
            value = struct.unpack_from("<II", table, at)[1]
            found[attribute] = max(found.get(attribute, 0), value)
        at += size
    return found


def instructions(cubin: bytes, nvdisasm: str) -> Instructions:
    """Counts of tensor-core and local-memory instructions; `nvdisasm` is the program's path.

    Raises CubinError when it cannot be run or refuses the cubin.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(_for_disassembly(cubin))
        try:
            done = subprocess.run(
                [nvdisasm, "-c", str(path)], capture_output=True, text=True, timeout=120
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CubinError(f"{nvdisasm}: {error}") from error
    if done.returncode:
        raise CubinError(f"nvdisasm: {done.stderr.strip() or f'exit code {done.returncode}'}")
    local = Counter(_LOCAL.findall(done.stdout))
    return Instructions(
        dict(sorted(Counter(_MMA.findall(done.stdout)).items())), local["STL"], local["LDL"]
    )


_SAME_INSTRUCTIONS = {103: 100, 121: 120}
"""Arch -> one of the same family.  The nvdisasm of CUDA 12.8 refuses the former; told the
latter, it prints for sm_121 word for word what the same kernel gives for sm_120."""

_ARCH_BYTE = 49
"""Second byte of the ELF's flags, where cubins of Blackwell keep the arch."""


def _for_disassembly(cubin: bytes) -> bytes:
    """`cubin` as an arch that nvdisasm knows."""
    known = _SAME_INSTRUCTIONS.get(cubin[_ARCH_BYTE])
    if known is None:
        return cubin
    return cubin[:_ARCH_BYTE] + bytes([known]) + cubin[_ARCH_BYTE + 1 :]
