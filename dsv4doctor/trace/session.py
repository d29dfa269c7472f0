"""Starts the worker in the target interpreter and turns what it says into Traces."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsv4doctor.errors import DoctorError, UndeterminedError, UsageError, cut
from dsv4doctor.flags import advice, options_of
from dsv4doctor.models import SglangTree, Trace
from dsv4doctor.trace import cache
from dsv4doctor.trace.process import Worker, ended_by_signals, signals_wait
from dsv4doctor.trace.protocol import trace_from
from dsv4doctor.trace.request import TraceRequest

Progress = Callable[[str], None]


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
        request.tree.borrowed,
        str(request.interpreter),
        tuple(request.python_path()),
        request.user_base(),
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
    with ended_by_signals(), tempfile.TemporaryDirectory(prefix="dsv4doctor-") as scratch:
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
        worker: Worker | None = None
        results: dict[int, Trace | DoctorError] = {}
        try:
            with signals_wait():  # one that came now would leave the process behind
                worker = Worker(first, scratch, jobs)
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
    line = " ".join(complaint.split()) if marker else "it stopped while reading the flags"
    _, unrecognised, named = line.partition("unrecognized arguments: ")
    hint = advice(named.split(), _known_options(request.tree)) if unrecognised else None
    return (
        f"{request.launch.source}: SGLang {request.tree.version} does not take these flags: "
        f"{cut(line, 300)}",
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
