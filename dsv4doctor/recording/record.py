"""One process's recording: what its layers got, and what their first forwards called."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from dsv4doctor.recording.observer import ServerCalls
from dsv4doctor.recording.once import observe
from dsv4doctor.recording.plugin import guarded
from dsv4doctor.recording.report import RAN, text_of
from dsv4doctor.trace.worker.windows import (
    DENSE,
    INDEXER,
    MHC,
    MLA,
    Window,
    path_entry,
    raised_inside,
    runner_of,
)

_KINDS = {"DECODE": "decode", "TARGET_VERIFY": "decode", "EXTEND": "prefill", "MIXED": "prefill"}
"""What SGLang's forward modes are in the words of a trace."""


class Recording:
    """Layers and paths of this process's models; written anew whenever there is more to say."""

    def __init__(self, file: str, runner: Any, arguments: dict[str, Any]) -> None:
        self.path = replaceable(file_of_rank(file, runner))
        self.server_args = runner.server_args
        self.arguments = arguments
        self.layers: list[dict[str, Any]] = []
        self.paths: list[dict[str, Any]] = []
        self.waiting: Counter[str] = Counter()  # routed-expert layers that have not run, by role

    def model(self, runner: Any, found: dict[int, dict[str, Any]]) -> None:
        """Take a loaded model in; `found` as a LayerWatch keeps it."""
        role = "draft" if runner.is_draft_worker else "main"
        self._experts(role, runner.model, found)
        guarded(self._mixing, role, runner.model)
        guarded(self._attention, role, runner)
        self.write()

    # ---- routed experts

    def _experts(self, role: str, model: Any, found: dict[int, dict[str, Any]]) -> None:
        from sglang.srt.layers.moe.fused_moe_triton import FusedMoE

        from dsv4doctor.trace.worker.launch import backend_of

        for name, layer in model.named_modules():
            if not isinstance(layer, FusedMoE):
                continue
            seen = found.get(id(layer), {"decided_at": None, "flags_consulted": []})
            flags = list(seen["flags_consulted"])
            if "speculative_moe_runner_backend" in flags and self._speculative_follows():
                flags.append("moe_runner_backend")
            entry = {
                "name": name,
                "role": role,
                "quant_method": type(layer.quant_method).__name__,
                "runner_backend": backend_of(getattr(layer.quant_method, "runner", None)),
                "decided_at": seen["decided_at"],
                "flags_consulted": flags,
                "kernel": None,
                "why_no_kernel": "no forward of it was recorded",
                "error": None,
            }
            self.layers.append(entry)
            self.waiting[role] += 1
            self._expert(role, entry, layer)

    def _expert(self, role: str, entry: dict[str, Any], layer: Any) -> None:
        from dsv4doctor.trace.worker.forward import first_kernel

        def done(calls: ServerCalls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
            entry["kernel"] = first_kernel(calls.native, calls.error is None)
            entry["why_no_kernel"] = "its forward called no kernel that is known as MoE"
            if calls.error is not None:
                entry["error"] = raised(f"{role} forward", calls.error)
            self.waiting[role] -= 1
            if not self.waiting[role]:
                self.write()
            return True

        def of_this_layer(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
            return kwargs.get("layer", args[0] if args else None) is layer

        observe(layer.quant_method, "apply", done, of_this_layer)

    def _speculative_follows(self) -> bool:
        """True when --speculative-moe-runner-backend says no more than the main flag does."""
        from dsv4doctor.trace.worker.serving import resolved

        view = resolved(self.server_args)
        own = getattr(view, "speculative_moe_runner_backend", None)
        return own in (None, getattr(view, "moe_runner_backend", None))

    # ---- other paths

    def _mixing(self, role: str, model: Any) -> None:
        from dsv4doctor.trace.worker.paths import mixing_layers

        layer, names = mixing_layers(model)
        for path, method in (("mhc-pre", "hc_pre"), ("mhc-post", "hc_post")):
            if layer is not None:

                def done(
                    calls: ServerCalls,
                    args: tuple[Any, ...],
                    kwargs: dict[str, Any],
                    path: str = path,
                ) -> bool:
                    self._add(role, path, names, calls, MHC)
                    return True

                observe(layer, method, done)

    def _attention(self, role: str, runner: Any) -> None:
        from dsv4doctor.trace.worker.paths import attention_classes

        for modules in attention_classes(runner.model).values():
            guarded(self._one_attention, role, runner, modules)

    def _one_attention(self, role: str, runner: Any, modules: list[tuple[str, Any]]) -> None:
        names = [name for name, _ in modules]
        name, attention = modules[0]
        missing = {"decode", "prefill"}

        def done(calls: ServerCalls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
            kind = _kind(args, kwargs)
            detail = f"compress ratio {getattr(attention, 'compress_ratio', 0)}"
            self._add(role, f"sparse-mla-{kind}", names, calls, MLA, detail=detail)
            if getattr(attention, "indexer", None) is not None:
                self._add(role, f"indexer-{kind}", names, calls, INDEXER)
            if len(missing) == 2:  # the first time
                self._dense(role, name, attention, calls)
                guarded(self._kv_cache, role, runner, names)
            missing.discard(kind or "")
            self.write()
            return not missing

        observe(attention, "forward", done, lambda *given: _kind(*given) in missing)

    def _dense(self, role: str, name: str, attention: Any, calls: ServerCalls) -> None:
        inner = [
            f"{name}.{part}"
            for part, module in attention.named_modules()
            if "Linear" in type(getattr(module, "quant_method", None)).__name__
            and part != "wo_a"  # which the attention multiplies by itself
            and getattr(getattr(module, "weight", None), "itemsize", 2) == 1
        ]
        self._add(role, "dense-fp8", inner, calls, DENSE, choice=runner_of(calls))

    def _kv_cache(self, role: str, runner: Any, names: list[str]) -> None:
        from dsv4doctor.trace.worker.paths import layout_of

        detail, choice = layout_of(runner.token_to_kv_pool)
        if not any((path["name"], path["role"]) == ("kv-cache", role) for path in self.paths):
            flags = ["kv_cache_dtype", "page_size"]
            entry = path_entry(role, "kv-cache", names, choice=choice, detail=detail, flags=flags)
            self.paths.append(entry)

    def _add(
        self,
        role: str,
        path: str,
        names: list[str],
        calls: ServerCalls,
        window: Window,
        choice: str | None = None,
        detail: str = "",
    ) -> None:
        from dsv4doctor.trace.worker.launch import describe_error

        kernel, place = window.kernel(calls)
        given = {"choice": choice} if choice and kernel else {}
        entry = path_entry(role, path, names, kernel, calls, place, window, detail=detail, **given)
        if calls.error is not None and raised_inside(calls.error, path):
            entry["error"] = raised(f"{role} {path}", calls.error)  # after its kernel, too
        elif entry["error"] is not None:
            entry["error"] = describe_error(f"{role} {path}", entry["error"])
        self.paths.append(entry)

    # ---- the file

    def write(self) -> None:
        """Replace this rank's file in one step."""
        text = text_of(self.layers, self.paths, self.arguments)
        descriptor, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.name)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
                stream.write(text)
            os.replace(temporary, self.path)
        except BaseException:
            os.unlink(temporary)
            raise


def _kind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """ "decode" or "prefill" by the forward batch among the arguments; None for other modes."""
    for value in (*args, *kwargs.values()):
        mode = getattr(value, "forward_mode", None)
        if mode is not None:
            return _KINDS.get(mode.name)
    return None


def raised(phase: str, error: Exception) -> dict[str, Any]:
    """An exception as data: in a server it is real, whoever raised it."""
    from dsv4doctor.trace.worker.launch import describe_error

    return {**describe_error(phase, error), "by_sglang": True}


def replaceable(path: Path) -> Path:
    """`path`, links followed; FileExistsError for what is there and no recording: it would be
    lost, and /dev/null for everyone."""
    path = Path(os.path.realpath(path))
    if os.path.lexists(path):
        is_ours = path.is_file() and (not path.stat().st_size or RAN in path.read_text("utf-8"))
        if not is_ours:
            raise FileExistsError(f"{path} is there, and is no recording: not written over")
    return path


def file_of_rank(file: str, runner: Any) -> Path:
    """FILE for the first rank; the others put what tells them apart in front of its ending."""
    parallel = getattr(runner, "ps", runner)
    parts = [
        f"{short}{rank}"
        for short, name in (("pp", "pp_rank"), ("dp", "dp_rank"), ("tp", "tp_rank"))
        if (rank := getattr(parallel, name, None))
    ]
    path = Path(file).absolute()
    return path.with_name(".".join([path.stem, *parts]) + path.suffix)
