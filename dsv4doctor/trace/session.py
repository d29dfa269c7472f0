"""Starts the worker in the target interpreter and turns what it says into Traces."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from dsv4doctor.errors import DoctorError, UndeterminedError, UsageError
from dsv4doctor.facts.hub import hub_cache
from dsv4doctor.flags import advice, options_of
from dsv4doctor.models import Arch, Checkpoint, Gpu, Launch, SglangTree, Trace
from dsv4doctor.trace import cache
from dsv4doctor.trace.protocol import trace_from

WORKER = Path(__file__).parent / "worker"
OURSELVES = Path(__file__).parent.parent
MEMORY_LIMIT_BYTES = 8 << 30
_ROOM_FOR_BYTECODE = 256 << 20
_LATE = ("the trace did not finish in time", "give it longer with --timeout SECONDS")
Progress = Callable[[str], None]

# Kernels are recorded and never run; Triton's interpreter would run them on tensors without data.
_ONLY_FOR_KERNELS = {"TRITON_INTERPRET"}
_RELEVANT = (
    "SGLANG_",
    "SGL_",
    "FLASHINFER_",
    "NCCL_",
    "CUDA_",
    "TORCH_",
    "PYTORCH_",
    "TRITON_",
    "TVM_",
    "DG_",
    "DEEP_GEMM_",
    "DEEPEP_",
    "NVSHMEM_",
    "HF_",
    "HUGGINGFACE_",
    "TRANSFORMERS_",
)


@dataclass(frozen=True)
class TraceRequest:
    """One launch to trace."""

    tree: SglangTree
    interpreter: Path
    """The Python whose torch and transformers are used."""
    arch: Arch
    checkpoint: Checkpoint
    model_path: Path
    """The folder that SGLang reads config and headers from."""
    launch: Launch
    with_path: bool = False
    """Also record the decision path."""
    with_paths: bool = False
    """Also run the hot paths beside the routed experts; costs a second or two."""
    environment: Mapping[str, str] | None = None
    """The machine's variables under the launch's own; None: this process's."""
    gpu: Gpu | None = None
    gpu_count: int | None = None
    elsewhere: bool = False
    """The launch is for another machine: what SGLang asks of this one is stood in for."""
    whole: bool = False
    """Import what SGLang imports, all of it: slow, to check that the lean trace says the same."""
    modules: tuple[str, ...] = ()
    """Modules of SGLang that have to import (or compile, where a trace leaves them out)."""

    def variables(self) -> dict[str, str]:
        """The variables that SGLang will see, the launch's own last."""
        return {
            name: value
            for name, value in self.all_variables().items()
            if name.startswith(_RELEVANT) and name not in _ONLY_FOR_KERNELS
        }

    def all_variables(self) -> dict[str, str]:
        """The same with the machine's other ones."""
        base = os.environ if self.environment is None else self.environment
        return {**base, **self.launch.environment}

    def arguments(self) -> list[str]:
        return ["--model-path", str(self.model_path), *self.launch.flags]


def trace_launch(
    request: TraceRequest,
    *,
    use_cache: bool = True,
    timeout: float = 300.0,
    progress: Progress | None = None,
) -> Trace:
    """What `request` resolves to, from the cache when nothing it depends on has changed.

    Raises UsageError when SGLang rejects a flag, UndeterminedError when the worker could not
    finish (`timeout` seconds passed, it was killed, it failed on something of its own).
    """
    outcome = trace_launches([request], use_cache=use_cache, timeout=timeout, progress=progress)[0]
    if isinstance(outcome, DoctorError):
        raise outcome
    return outcome


def trace_launches(
    requests: Sequence[TraceRequest],
    *,
    use_cache: bool = True,
    timeout: float = 300.0,
    progress: Progress | None = None,
) -> list[Trace | DoctorError]:
    """One outcome per request, in order.

    Launches of one tree, interpreter, GPU and environment share one import of SGLang.
    `timeout` is in seconds, for each such group.
    """
    outcomes: dict[int, Trace | DoctorError] = {}
    keys: dict[int, str] = {}
    hashes: dict[Path, str] = {}
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index, request in enumerate(requests):
        keys[index] = cache.key(request, hashes) if use_cache else ""
        known = cache.load(keys[index], request.tree) if use_cache else None
        if known is not None:
            outcomes[index] = known
        else:
            groups.setdefault(_group(request), []).append(index)
    for indices in groups.values():
        results = _run_group([requests[index] for index in indices], timeout, progress)
        outcomes.update(zip(indices, results, strict=True))
        # What may be the trace's own doing gets a second try, and is never kept.
        doubtful = [index for index in indices if _is_doubtful(outcomes[index])]
        if doubtful:
            again = _run_group([requests[index] for index in doubtful], timeout, progress)
            outcomes.update(zip(doubtful, again, strict=True))
        for index in indices:
            result = outcomes[index]
            if use_cache and isinstance(result, Trace) and not _is_doubtful(result):
                cache.store(keys[index], result)
                if requests[index].modules:  # that they import changes nothing else
                    bare = replace(requests[index], modules=())
                    cache.store(cache.key(bare, hashes), result)
    return [outcomes[index] for index in range(len(requests))]


def _is_doubtful(outcome: Trace | DoctorError) -> bool:
    """True for a trace that something other than SGLang's own code stopped short."""
    return isinstance(outcome, Trace) and (
        bool(outcome.unresolved)
        or any("trace's own doing" in layer.reason for layer in outcome.layers)
    )


def _group(request: TraceRequest) -> tuple[Any, ...]:
    variables = tuple(sorted(request.variables().items()))
    return (
        request.tree.root,
        str(request.interpreter),
        request.arch,
        request.gpu,
        request.whole,
        request.modules,
        variables,
    )


def _run_group(
    requests: Sequence[TraceRequest], timeout: float, progress: Progress | None
) -> list[Trace | DoctorError]:
    first = requests[0]
    with _ended_by_signals(), tempfile.TemporaryDirectory(prefix="dsv4doctor-") as scratch:
        jobs = [
            {
                "id": index,
                "arguments": request.arguments(),
                "with_path": request.with_path,
                "with_paths": request.with_paths,
                "elsewhere": request.elsewhere,
            }
            for index, request in enumerate(requests)
        ]
        worker: _Worker | None = None
        results: dict[int, Trace | DoctorError] = {}
        try:
            with _signals_wait():  # one that came now would leave the process behind
                worker = _Worker(first, scratch, jobs)
            for event in worker.events(time.monotonic() + timeout):
                if event["event"] == "phase":
                    if progress is not None:
                        progress(event["text"])
                elif event["event"] == "failure" and event["job"] is None:
                    raise UndeterminedError(*_import_failure(event["message"], first))
                else:
                    index = event["job"]
                    results[index] = _outcome(event, requests[index])
        except UndeterminedError as error:
            missing = {index: error for index in range(len(requests)) if index not in results}
            results.update(missing)
        finally:
            if worker is not None:
                worker.close()
        return [
            results.get(index) or UndeterminedError("the trace worker gave no result")
            for index in range(len(requests))
        ]


def _outcome(event: dict[str, Any], request: TraceRequest) -> Trace | DoctorError:
    if event["event"] == "failure":
        return UndeterminedError(f"the trace failed: {event['message']}")
    result = event["result"]
    if result["usage_error"] is not None:
        return UsageError(*_flag_message(result["usage_error"], request))
    return trace_from(result, request.tree, request.arch, request.checkpoint)


def _flag_message(said: str, request: TraceRequest) -> tuple[str, str]:
    """SGLang's own complaint about a flag, without the usage text in front."""
    _, marker, complaint = said.rpartition("error: ")
    line = " ".join(complaint.split())[:300] if marker else "it stopped while reading the flags"
    _, unrecognised, named = line.partition("unrecognized arguments: ")
    hint = advice(named.split(), _known_options(request.tree)) if unrecognised else None
    return (
        f"{request.launch.source}: SGLang {request.tree.version} does not take these flags: {line}",
        hint or _where_flags_are(request.tree, request.interpreter),
    )


def _where_flags_are(tree: SglangTree, interpreter: Path) -> str:
    """Where SGLang's flags can be looked up; a borrowed tree cannot be asked for its help."""
    if tree.borrowed:
        return f"its flags are in {Path(tree.root) / 'sglang' / 'srt' / 'server_args.py'}"
    return f"compare with `{interpreter} -m sglang.launch_server --help`"


def _known_options(tree: SglangTree) -> set[str]:
    root = Path(tree.root) / "sglang" / "srt"
    files = [root / "server_args.py", *sorted((root / "arg_groups" / "fields").glob("*.py"))]
    texts = (file.read_text(encoding="utf-8", errors="replace") for file in files if file.is_file())
    return options_of(texts)


def _import_failure(message: str, request: TraceRequest) -> tuple[str, str]:
    return (
        f"SGLang {request.tree.version} at {request.tree.root} could not be imported by "
        f"{request.interpreter}: {message}",
        "use --python with the interpreter of the serving environment, or install "
        "dsv4doctor[trace] for one that a trace can borrow",
    )


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Have SIGTERM and SIGHUP raise, so that the worker and its folder go with this process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """Have a signal that ends this process count after the block."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python handles signals in the main thread only
        return
    came: list[int] = []
    ending = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda *got: came.append(got[0])) for number in ending}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        signal.raise_signal(came[0])


class _Worker:
    """The process, its event pipe and its deadline."""

    def __init__(self, request: TraceRequest, scratch: str, jobs: list[dict[str, Any]]) -> None:
        self.awaited = len(jobs)
        read, write = os.pipe()
        self.pipe = os.fdopen(read, "rb", buffering=0)
        self.errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed in close())
        # A file, not a pipe: an interpreter that reads nothing cannot make us wait.
        request_file = Path(scratch) / "request.json"
        try:
            request_file.write_text(json.dumps(_message(request, scratch, jobs, write)))
        except OSError as error:
            os.close(write)
            self.pipe.close()
            raise UsageError(
                f"{scratch}: cannot be written ({error.strerror})",
                "set TMPDIR to a folder that can",
            ) from error
        try:
            self.process = subprocess.Popen(
                [str(request.interpreter), str(WORKER), str(request_file)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self.errors,
                pass_fds=(write,),
                env=_environment(request, scratch),
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            self.pipe.close()
            self.errors.close()
            reason = getattr(error, "strerror", None) or error
            raise UsageError(
                f"{request.interpreter}: cannot be started ({reason})",
                "give the Python of the serving environment with --python",
            ) from error
        finally:
            os.close(write)

    def events(self, deadline: float) -> Iterator[dict[str, Any]]:
        """Events until every job has one, or the worker ends; UndeterminedError past `deadline`."""
        buffered = b""
        while self.awaited > 0:
            chunk = self._read(deadline)
            if not chunk:
                break
            *lines, buffered = (buffered + chunk).split(b"\n")
            for line in lines:
                event = _event(line)
                if event["event"] != "phase":
                    self.awaited -= 1 if event["job"] is not None else self.awaited
                yield event
        if self.awaited > 0:
            try:  # it may have closed the pipe and live on
                status = self.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired as error:
                raise UndeterminedError(*_LATE) from error
            raise UndeterminedError(f"the trace worker {_ended(status)}", self._last_words())

    def _read(self, deadline: float) -> bytes:
        """The next bytes of the pipe; b"" when the worker has ended and nothing is left in it."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.pipe, selectors.EVENT_READ)
            while True:
                # Whatever the worker started may hold the pipe open after it: look at both.
                ended = self.process.poll() is not None
                remaining = deadline - time.monotonic()
                if selector.select(0 if ended else max(0.0, min(remaining, 0.2))):
                    return self.pipe.read(1 << 16)
                if ended:
                    return b""
                if remaining <= 0:
                    raise UndeterminedError(*_LATE)

    def _last_words(self) -> str | None:
        size = self.errors.seek(0, os.SEEK_END)
        self.errors.seek(max(0, size - 4000))
        lines = self.errors.read(4000).decode(errors="replace").strip().splitlines()
        return f"its last words: {lines[-1][:300]}" if lines else None

    def close(self) -> None:
        """End the worker and everything it forked."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.pipe.close()
        self.errors.close()


def _event(line: bytes) -> dict[str, Any]:
    try:
        event = json.loads(line)
        if event["event"] != "phase":
            event["job"]
        return dict(event)
    except (ValueError, TypeError, KeyError) as error:
        raise UndeterminedError(
            "the trace worker said something that is no event",
            "give the Python of the serving environment with --python",
        ) from error


def _ended(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with exit code {status}"


def _environment(request: TraceRequest, scratch: str) -> dict[str, str]:
    """A clean environment: the variables SGLang reads, and no way to the user's own folders."""
    clean = {
        "PATH": os.environ.get("PATH", os.defpath),
        "LANG": "C.UTF-8",
        "HOME": scratch,
        "TMPDIR": scratch,
        "XDG_CACHE_HOME": scratch,
    }
    for name in ("LD_LIBRARY_PATH", "VIRTUAL_ENV"):
        if name in os.environ:
            clean[name] = os.environ[name]
    clean.update(request.variables())
    clean.update(
        HF_HUB_CACHE=str(hub_cache(request.all_variables())),  # HOME is another there
        CUDA_VISIBLE_DEVICES="",
        HF_HUB_OFFLINE="1",
        TOKENIZERS_PARALLELISM="false",
        PYTHONNOUSERSITE="1",
        OMP_NUM_THREADS="1",
        PYTHONHASHSEED="0",  # the same launch, the same answer
        DSV4DOCTOR_IN_TRACE="1",  # our adapters ask for no stamp where no kernel runs
    )
    return clean


def _message(
    request: TraceRequest, scratch: str, jobs: list[dict[str, Any]], write: int
) -> dict[str, Any]:
    gpu = request.gpu
    bytecode = _bytecode_folder()
    return {
        "events_fd": write,
        "tree": request.tree.root,
        "metadata": cache.metadata_text(request.tree),
        "capability": [request.arch.major, request.arch.minor],
        "gpu": None
        if gpu is None
        else {"name": gpu.name, "memory_bytes": gpu.memory_bytes, "count": request.gpu_count},
        "scratch": scratch,
        "bytecode": str(bytecode) if bytecode else None,
        "memory_bytes": MEMORY_LIMIT_BYTES,
        "verbose": bool(os.environ.get("DSV4DOCTOR_TRACE_LOG")),
        "serving": not request.tree.borrowed,
        "dsv4doctor": str(OURSELVES) if request.tree.borrowed else None,
        "whole": request.whole,
        "modules": list(request.modules),
        "jobs": jobs,
    }


def _bytecode_folder() -> Path | None:
    """Where compiled modules of a tree are kept; None where they cannot be, or only in part.

    Python 3.11 keeps a compiled module that a full disk cut short, and fails on it ever after.
    """
    folder = cache.folder() / "bytecode"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return folder if shutil.disk_usage(folder).free > _ROOM_FOR_BYTECODE else None
    except (OSError, ValueError):
        return None
