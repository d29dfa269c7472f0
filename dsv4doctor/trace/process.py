"""The worker's process: started in the target interpreter, heard, and ended with all it forked."""

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
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from dsv4doctor.errors import UndeterminedError, UsageError
from dsv4doctor.facts.hub import hub_cache
from dsv4doctor.trace import cache
from dsv4doctor.trace.request import TraceRequest

LOG = "DSV4DOCTOR_TRACE_LOG"
"""Set: what the worker and SGLang say in it goes to our standard error."""
WORKER = Path(__file__).parent / "worker"
OURSELVES = Path(__file__).parent.parent
MEMORY_LIMIT_BYTES = 8 << 30
_ROOM_FOR_BYTECODE = 256 << 20
_LATE = ("the trace did not finish in time", "give it longer with --timeout SECONDS")


class Worker:
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
                stderr=None if os.environ.get(LOG) else self.errors,
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
        "verbose": bool(os.environ.get(LOG)),
        "serving": not request.tree.borrowed,
        "python_path": request.python_path(),
        "user_base": request.user_base(),
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


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
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
def signals_wait() -> Iterator[None]:
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
