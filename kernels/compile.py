"""Compiles every configuration ahead of time for a GPU that need not be there, and reads it.

The work is done in child processes that import Triton without its interpreter; this module
imports neither torch nor Triton by itself.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from dsv4doctor.errors import UsageError
from dsv4doctor.kernels import cubin, registry

SHARED_LIMIT_BYTES = {
    "sm_90": 232448,
    "sm_100": 232448,
    "sm_103": 232448,
    "sm_120": 101376,
    "sm_121": 101376,
}
"""Shared memory that one block can have (CUDA programming guide, technical specifications)."""


@dataclass(frozen=True)
class Compiled:
    """One configuration on one arch."""

    operation: str
    case: str
    arch: str
    status: str
    """"ok", "does not fit", "spills", "failed" or "withheld"."""
    detail: str = ""
    registers: int = 0
    """Per thread."""
    stack_bytes: int = 0
    spill_instructions: int = 0
    """Stores to and loads from local memory in the code."""
    static_shared_bytes: int = 0
    dynamic_shared_bytes: int = 0
    shared_limit_bytes: int = 0
    num_warps: int = 0
    num_stages: int = 0
    mma: Mapping[str, int] = field(default_factory=dict)

    @property
    def shared_bytes(self) -> int:
        return self.static_shared_bytes + self.dynamic_shared_bytes

    @property
    def passed(self) -> bool:
        """True also for what is withheld: it is not offered, so nothing can break."""
        return self.status in ("ok", "withheld")


def load(source: str) -> ModuleType:
    """A registered operation by name, or a kernel file by path (`something.py`)."""
    if not source.endswith(".py"):
        return registry.load(source)
    spec = importlib.util.spec_from_file_location(Path(source).stem, source)
    if spec is None or spec.loader is None:
        raise UsageError(f"{source}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parse_archs(text: str) -> tuple[str, ...]:
    """ "sm_120,sm_121" as a tuple.  Raises UsageError for an arch that is not known."""
    archs = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    unknown = [arch for arch in archs if arch not in SHARED_LIMIT_BYTES]
    if unknown or not archs:
        raise UsageError(
            f"--arch {text}: {'unknown ' + ', '.join(unknown) if unknown else 'no arch given'}",
            f"known: {', '.join(SHARED_LIMIT_BYTES)}",
        )
    return archs


def compile_all(
    sources: Sequence[str], archs: Sequence[str], processes: int = 1
) -> Iterator[Compiled | int]:
    """First the number of configurations, then each one as it gets done, in no fixed order.

    `sources` as for `load`.  A file that cannot be loaded, or whose `compile_cases` raises, gives
    one "failed" entry with an empty case name; one that is not offered on an arch, one
    "withheld" entry.
    """
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, context, initializer=_start_worker)
    try:
        yield from _compiled(pool, sources, archs)
    except BaseException:  # interrupted: what compiles now may take minutes more
        for process in multiprocessing.active_children():
            process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _compiled(
    pool: ProcessPoolExecutor, sources: Sequence[str], archs: Sequence[str]
) -> Iterator[Compiled | int]:
    listed = {
        pool.submit(_list_cases, source, arch): (source, arch)
        for source in sources
        for arch in archs
    }
    jobs: list[tuple[str, str, int]] = []
    settled: list[Compiled] = []
    for future in listed:
        source, arch = listed[future]
        count = future.result()
        if isinstance(count, Compiled):
            settled.append(count)
        else:
            jobs.extend((source, arch, index) for index in range(count))
    yield len(jobs) + len(settled)
    yield from settled
    for done in as_completed([pool.submit(_compile_one, *job) for job in jobs]):
        yield done.result()


def _start_worker() -> None:
    """Triton decides on import whether to interpret; this process has to compile.

    An interrupt is the parent's to answer, and without a parent there is nobody to compile for.
    """
    os.environ.pop("TRITON_INTERPRET", None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _list_cases(source: str, arch: str) -> int | Compiled:
    """How many configurations `source` has for `arch`; a result instead when it has none."""
    try:
        module = load(source)
        if arch not in module.META.archs:
            why = f"the kernel is not offered on {arch}"
            return Compiled(_operation(source), "(all)", arch, "withheld", why)
        return len(module.compile_cases(arch))
    except Exception as error:
        return Compiled(_operation(source), "", arch, "failed", _one_line(error))


def _compile_one(source: str, arch: str, index: int) -> Compiled:
    case = load(source).compile_cases(arch)[index]
    return compile_case(_operation(source), case, arch)


def _operation(source: str) -> str:
    return Path(source).stem


def compile_case(operation: str, case: registry.CompileCase, arch: str) -> Compiled:
    """Compiles `case` for `arch` and judges what came out.  Raises nothing of the compiler's."""
    if case.withheld:
        return Compiled(operation, case.name, arch, "withheld", case.withheld)
    try:
        binary, dynamic_shared = _build(case, arch)
        used = cubin.resources(binary)
        code = cubin.instructions(binary, _nvdisasm())
    except Exception as error:
        return Compiled(operation, case.name, arch, "failed", _one_line(error))
    limit = SHARED_LIMIT_BYTES[arch]
    status, detail = _judge(used, code, dynamic_shared, limit)
    return Compiled(
        operation=operation,
        case=case.name,
        arch=arch,
        status=status,
        detail=detail,
        registers=used.registers,
        stack_bytes=used.stack_bytes,
        spill_instructions=code.local_stores + code.local_loads,
        static_shared_bytes=used.static_shared_bytes,
        dynamic_shared_bytes=dynamic_shared,
        shared_limit_bytes=limit,
        num_warps=case.num_warps,
        num_stages=case.num_stages,
        mma=code.mma,
    )


def _build(case: registry.CompileCase, arch: str) -> tuple[bytes, int]:
    """The cubin, and the dynamic shared memory that its launch asks for."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = case.kernel.arg_names
    unknown = (case.signature.keys() | case.constexprs.keys() | set(case.aligned)) - set(names)
    missing = set(names) - case.signature.keys() - case.constexprs.keys()
    if unknown or missing:
        raise ValueError(f"signature: unknown {sorted(unknown)}, missing {sorted(missing)}")
    signature = {
        name: "constexpr" if name in case.constexprs else case.signature[name] for name in names
    }
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in case.aligned}
    source = ASTSource(case.kernel, signature, dict(case.constexprs), attributes)
    with contextlib.redirect_stdout(io.StringIO()):  # Triton prints all PTX when ptxas fails
        compiled = triton.compile(
            source,
            target=GPUTarget("cuda", int(arch.removeprefix("sm_")), 32),
            options={"num_warps": case.num_warps, "num_stages": case.num_stages, **case.options},
        )
    return compiled.asm["cubin"], compiled.metadata.shared


def _nvdisasm() -> str:
    from triton import knobs

    return str(knobs.nvidia.nvdisasm.path)


def _judge(
    used: cubin.Resources, code: cubin.Instructions, dynamic_shared: int, limit: int
) -> tuple[str, str]:
    """Status and detail."""
    shared = used.static_shared_bytes + dynamic_shared
    if shared > limit:
        return "does not fit", f"{shared} bytes of shared memory, the limit is {limit}"
    if used.stack_bytes or code.local_stores or code.local_loads:
        return "spills", (
            f"{used.stack_bytes} bytes of stack, {code.local_stores} local stores, "
            f"{code.local_loads} local loads"
        )
    return "ok", ""


def _one_line(error: BaseException) -> str:
    """The error's type and its last line that says something (compilers quote source first)."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if set(line) - set("^~ ")] or [""]
    return f"{type(error).__name__}: {said[-1]}"[:300]


def as_plain(results: Sequence[Compiled]) -> list[dict[str, Any]]:
    """`results` for JSON, in a fixed order."""
    ordered = sorted(results, key=lambda r: (r.operation, r.arch, r.case))
    return [{**vars(result), "mma": dict(result.mma)} for result in ordered]
