"""What is wrapped in SGLang: the layers while they are built, a model once it is loaded."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from dsv4doctor.recording.plugin import complain, guarded, stopped


class Hooks:
    """The three places in one process; `file` is what DSV4DOCTOR_RECORD says."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.speculative = 0  # how many of SGLang's contexts that switch the flags are open
        self.watch: Any = None
        self.recordings: list[Any] = []
        self.arguments: dict[str, Any] = {}

    def contexts(self, module: ModuleType) -> None:
        """Notice when a draft's context swaps the runner flags for the speculative ones."""
        name = "speculative_moe_backend_context"
        original = getattr(module, name, None)
        if original is None:
            return

        @contextlib.contextmanager
        @functools.wraps(original)
        def counted(*args: Any, **kwargs: Any) -> Iterator[Any]:
            with original(*args, **kwargs) as value:
                self.speculative += 1
                try:
                    yield value
                finally:
                    self.speculative -= 1

        setattr(module, name, counted)

    def layers(self, module: ModuleType) -> None:
        """Notice, for every FusedMoE, who decides its quant method and which flags they read."""
        from dsv4doctor.trace.worker.layer_watch import LayerBuild, LayerWatch

        hooks = self

        class Watch(LayerWatch):  # type: ignore[misc]
            @property
            def switched(self) -> bool:
                return hooks.speculative > 0

            @switched.setter
            def switched(self, value: bool) -> None:
                pass

            def _run(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                before = sys.gettrace()
                code = getattr(self.original, "__code__", None)
                if stopped() or code is None:
                    self.original(layer, *args, **kwargs)
                    return
                build = LayerBuild(code, before)
                sys.settrace(_harmless(build.on_call))
                try:
                    self.original(layer, *args, **kwargs)
                finally:
                    sys.settrace(before)
                    guarded(self.keep, layer, build)

        self.watch = Watch(module.FusedMoE, False)
        self.watch.__enter__()

    def runner(self, module: ModuleType) -> None:
        """Look at each model after SGLang has loaded it."""
        original = module.ModelRunner.load_model
        hooks = self

        @functools.wraps(original)
        def load_model(runner: Any, *args: Any, **kwargs: Any) -> Any:
            guarded(hooks.loads, runner)
            result = original(runner, *args, **kwargs)
            guarded(hooks.loaded, runner)
            return result

        module.ModelRunner.load_model = load_model

    def loads(self, runner: Any) -> None:
        """Keep the arguments as SGLang resolved them: a model that is built may change some."""
        from dsv4doctor.recording.report import arguments_of

        if not self.arguments:
            self.arguments = arguments_of(runner.server_args)

    def loaded(self, runner: Any) -> None:
        """Start recording a model runner's first forwards."""
        from dsv4doctor.recording.record import Recording

        if not self.recordings:
            self.recordings.append(Recording(self.file, runner, self.arguments))
        found = self.watch.found if self.watch is not None else {}
        self.recordings[0].model(runner, found)


def _harmless(trace: Callable[..., Any]) -> Callable[..., Any]:
    """A trace function whose own errors do not reach the code that is traced."""

    def traced(frame: Any, event: str, argument: Any) -> Any:
        try:
            inner = trace(frame, event, argument)
        except Exception as error:
            complain(error)
            return None
        return None if inner is None else _harmless(inner)

    return traced
