"""What the session and the worker say to each other: one JSON request, then JSON lines.

Request (a file in the scratch folder):
    events_fd      file descriptor for the events
    tree           folder to import `sglang` from
    metadata       Requires-Dist lines of SGLang ("" when nothing tells what it requires)
    capability     [major, minor] of the simulated GPU
    gpu            {"name", "memory_bytes", "count"} or null
    scratch        the one folder the worker may write to
    bytecode       folder for the tree's compiled modules, or null
    memory_bytes   ceiling on the worker's memory
    serving        the interpreter is the one that will serve: what it lacks the server lacks
    python_path    folders that the server finds modules in too; empty unless it serves
    user_base      folder of the user's own packages, or null
    dsv4doctor     our own package, for a patched SGLang in an environment without it; or null
    whole          leave no part of SGLang out
    modules        modules of SGLang that have to import, or compile where they are left out
    verbose        let SGLang's own log through to standard error
    jobs           [{"id", "arguments", "with_path", "with_paths"}]; a launch each

Events (a JSON object a line):
    {"event": "phase", "text"}
    {"event": "result", "job", "result"}      see worker/launch.py
    {"event": "failure", "job", "message", "trace"}    job is null when no job has begun
"""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsv4doctor.errors import DoctorError, cut
from dsv4doctor.facts.checkpoint import read_checkpoint
from dsv4doctor.models import (
    ArgChange,
    Branch,
    Checkpoint,
    HotPath,
    Kernel,
    Layer,
    Location,
    MissingImport,
    Role,
    SglangError,
    SglangTree,
    Step,
    StoredFormat,
    Trace,
    Verdict,
)


def trace_from(
    result: dict[str, Any], tree: SglangTree, arch: Any, checkpoint: Checkpoint | None
) -> Trace:
    """The Trace that a worker's result describes; file names become relative to the tree.

    Without a checkpoint no layer has a stored format.
    """
    reader = _Reader(Path(tree.root), result.get("refused", ()))
    stored = _StoredFormats(checkpoint, result["resolved_args"])
    errors = [error for error in result["errors"] if error["by_sglang"]]
    return Trace(
        sglang=tree,
        arch=arch,
        resolved_args=result["resolved_args"],
        arg_changes=tuple(reader.arg_change(change) for change in result["arg_changes"]),
        environment_overwritten={
            name: (before, after)
            for name, (before, after) in sorted(result["environment_overwritten"].items())
        },
        layers=tuple(reader.layer(layer, stored) for layer in result["layers"]),
        errors=tuple(reader.error(error) for error in errors),
        unresolved=(
            *result.get("undetermined", ()),
            *(
                f"{error['phase']}: {artefact(error)}{reader.without}"
                for error in result["errors"]
                if not error["by_sglang"]
            ),
        ),
        steps=tuple(reader.step(step) for step in result["steps"]),
        leniencies=tuple(result["leniencies"]),
        timings=result["timings"],
        paths=tuple(reader.path(path) for path in result["paths"]),
        missing=tuple(
            MissingImport(one["package"], one["requirement"], reader.required_location(one["at"]))
            for one in result.get("missing", ())  # a recording has none: its server runs
        ),
    )


def artefact(error: dict[str, Any]) -> str:
    """One sentence on an exception that SGLang's own code did not raise."""
    where = error["innermost"] or "unknown code"
    message = cut(error["message"].splitlines()[0], 200) if error["message"] else "no message"
    if error["type"] in ("ImportError", "ModuleNotFoundError"):
        return f"{error['type']}: {message} (the Python that traced lacks it; the server's may not)"
    return (
        f"{error['type']}: {message} (raised in {Path(where).name}, outside SGLang, "
        "so it may be the trace's own doing)"
    )


def _stopped(error: dict[str, Any]) -> str:
    """One sentence on an exception that came before a path's own dispatch, or from elsewhere."""
    message = cut(error["message"].splitlines()[0], 200) if error["message"] else "no message"
    where = Path(error["innermost"] or "unknown code").name
    return f"the trace stopped before its kernel: {error['type']}: {message} (in {where})"


class _StoredFormats:
    """Stored format of a layer by SGLang's module name."""

    def __init__(self, checkpoint: Checkpoint | None, resolved: dict[str, Any]) -> None:
        self.main: dict[int, StoredFormat] = {}
        self.draft: dict[int, StoredFormat] = {}
        if checkpoint is None:
            return
        self.main = {layer.index: layer.stored_format for layer in checkpoint.main_layers}
        draft = _draft_checkpoint(checkpoint, resolved)
        layers = draft.draft_layers if draft is not None else ()
        self.draft = {layer.index: layer.stored_format for layer in layers}

    def of(self, role: Role, name: str) -> StoredFormat | None:
        numbers = [int(part) for part in name.split(".") if part.isdigit()]
        index = numbers[0] if numbers else 0
        return (self.main if role is Role.MAIN else self.draft).get(index)


def _draft_checkpoint(checkpoint: Checkpoint, resolved: dict[str, Any]) -> Checkpoint | None:
    """The checkpoint that the draft comes from: often the model's own.

    None for one of its own that cannot be read here.
    """
    path = resolved.get("speculative_draft_model_path")
    if not path or path == resolved.get("model_path"):
        return checkpoint
    try:
        return read_checkpoint(Path(path))
    except DoctorError:
        return None


class _Reader:
    def __init__(self, root: Path, refused: Sequence[str] = ()) -> None:
        """`refused`: what SGLang requires and is not there for it, where nothing stood in."""
        self.root = root
        install = " ".join(f"'{requirement}'" for requirement in refused)
        self.without = f"; not all that it requires is there: pip install {install}" * bool(refused)

    def location(self, where: dict[str, Any] | None) -> Location | None:
        if where is None:
            return None
        path = Path(where["file"])
        source = linecache.getline(str(path), where["line"]).strip() or None
        if path.is_relative_to(self.root):
            path = path.relative_to(self.root)
        return Location(path.as_posix(), where["line"], where["function"], source)

    def required_location(self, where: dict[str, Any] | None) -> Location:
        return self.location(where) or Location("unknown", 0)

    def arg_change(self, change: dict[str, Any]) -> ArgChange:
        return ArgChange(
            name=change["name"],
            before=change["before"],
            after=change["after"],
            at=self.required_location(change["at"]),
        )

    def error(self, error: dict[str, Any]) -> SglangError:
        return SglangError(
            error["phase"], error["type"], error["message"], self.location(error["at"])
        )

    def layer(self, layer: dict[str, Any], stored: _StoredFormats) -> Layer:
        role = Role(layer["role"])
        kernel, error = layer["kernel"], layer["error"]
        reason = layer["why_no_kernel"] or ""
        if error is not None and not error["by_sglang"]:
            reason, error = f"{artefact(error)}{self.without}", None
        return Layer(
            name=layer["name"],
            role=role,
            stored_format=stored.of(role, layer["name"]),
            quant_method=layer["quant_method"],
            runner_backend=layer["runner_backend"],
            decided_at=self.location(layer["decided_at"]),
            flags_consulted=tuple(layer["flags_consulted"]),
            kernel=Kernel(kernel["symbol"], self.location(kernel["at"])) if kernel else None,
            verdict=Verdict.UNKNOWN,
            reason=reason,
            error=self.error(error) if error else None,
            clamp_read=layer.get("clamp_read"),
            weights=layer.get("weights"),  # a recording sees them after they were processed
            lacks=layer.get("lacks") or "",
        )

    def path(self, path: dict[str, Any]) -> HotPath:
        kernel, error = path["kernel"], path["error"]
        reason = path["reason"]
        if error is not None and not error["by_sglang"]:
            reason, error = f"{_stopped(error)}{self.without}", None
        return HotPath(
            name=path["name"],
            role=Role(path["role"]),
            layers=tuple(path["layers"]),
            choice=path["choice"],
            kernel=Kernel(kernel["symbol"], self.location(kernel["at"])) if kernel else None,
            decided_at=self.location(path["decided_at"]),
            flags_consulted=tuple(path["flags_consulted"]),
            verdict=Verdict.UNKNOWN,
            reason=reason,
            detail=path["detail"],
            error=self.error(error) if error else None,
        )

    def step(self, step: dict[str, Any]) -> Step:
        branches = tuple(
            Branch(
                location=self.required_location(branch["location"]),
                condition=branch["condition"],
                values=branch["values"],
                taken=branch["taken"],
            )
            for branch in step["branches"]
        )
        where = self.location({"file": step["file"], "line": 0, "function": None})
        return Step(
            phase=step["phase"],
            function=step["function"],
            file=where.file if where else step["file"],
            branches=branches,
            returned=step["returned"],
            times=step["times"],
        )
