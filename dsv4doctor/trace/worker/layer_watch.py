"""Which line chose a layer's quant method, and which flags it read."""

import sys

from .recorder import location

# What a call of these means to somebody who sets flags.
FLAG_READERS = {
    "get_moe_runner_backend": "moe_runner_backend",
    "get_speculative_moe_runner_backend": "speculative_moe_runner_backend",
    "get_moe_a2a_backend": "moe_a2a_backend",
    "get_fp8_gemm_runner_backend": "fp8_gemm_runner_backend",
    "get_fp4_gemm_runner_backend": "fp4_gemm_runner_backend",
}
_DRAFT_READS = {
    "moe_runner_backend": "speculative_moe_runner_backend",
    "moe_a2a_backend": "speculative_moe_a2a_backend",
}


class LayerWatch:
    """Records, for every FusedMoE built inside it, who decided its quant method and what they read.

    `found[id(layer)]` is {"decided_at", "flags_consulted"}.
    """

    def __init__(self, layer_class, switched, path=None):
        """switched: True when a draft's context swaps the runner flags for the speculative ones.

        path: the PathWatch that is to follow what happens inside a layer's construction.
        """
        self.layer_class = layer_class
        self.switched = switched
        self.path = path
        self.found = {}

    def __enter__(self):
        self.original = self.layer_class.__init__
        watch = self

        def watched(layer, *args, **kwargs):
            watch._run(layer, args, kwargs)

        self.layer_class.__init__ = watched
        return self

    def __exit__(self, *exc):
        self.layer_class.__init__ = self.original

    def _run(self, layer, args, kwargs):
        build = LayerBuild(self.original.__code__, sys.gettrace())
        if self.path is not None:
            self.path.inside_layer = True
        sys.settrace(build.on_call)
        try:
            self.original(layer, *args, **kwargs)
        finally:
            sys.settrace(build.outer)
            if self.path is not None:
                self.path.inside_layer = False
            self.keep(layer, build)

    def keep(self, layer, build):
        """Put down what a layer's construction showed."""
        method = layer.__dict__.get("quant_method") or getattr(layer, "quant_method", None)
        self.found[id(layer)] = {
            "decided_at": build.decided_at(method),
            "flags_consulted": self._flags(build.reads_for(method)),
        }

    def _flags(self, reads):
        flags = []
        for name in reads:
            name = _DRAFT_READS.get(name, name) if self.switched else name
            if name not in flags:
                flags.append(name)
        return flags


class LayerBuild:
    """One FusedMoE.__init__: a trace function limited to the frames that decide."""

    def __init__(self, constructor, outer):
        self.constructor = constructor
        self.outer = outer  # the decision path's own trace function, when it runs too
        self.windows = 0
        self.returns = []  # (value, location) of each get_quant_method, innermost first
        self.assigned = None
        self.reads = []  # (flag, the objects whose __init__ is on the stack)
        self.constructing = []

    def on_call(self, frame, event, argument):
        chained = self.outer(frame, event, argument) if self.outer else None
        ours = self._watcher(frame)
        if ours is None:
            return chained
        return both(ours, chained) if chained else ours

    def _watcher(self, frame):
        code = frame.f_code
        name = code.co_name
        if code is self.constructor:
            return self._watch_constructor
        if name == "get_quant_method" or name == "create_moe_runner":
            self.windows += 1
            return self._watch_window
        if not self.windows:
            return None
        if name == "__init__":
            self.constructing.append(frame.f_locals.get("self"))
            return self._watch_init
        self._note_read(frame, name)
        return None

    def _note_read(self, frame, name):
        if name in FLAG_READERS:
            self._read(FLAG_READERS[name])
        elif name == "get" and frame.f_code.co_filename.endswith("environ.py"):
            variable = getattr(frame.f_locals.get("self"), "name", None)
            if isinstance(variable, str):
                self._read(variable)

    def _read(self, flag):
        self.reads.append((flag, tuple(self.constructing)))

    def _watch_constructor(self, frame, event, argument):
        if event in ("line", "return") and self.assigned is None:
            layer = frame.f_locals.get("self")
            method = layer.__dict__.get("quant_method") if layer is not None else None
            if method is not None:
                self.assigned = (method, self.before)
            self.before = location(frame)
        return self._watch_constructor

    before = None

    def _watch_window(self, frame, event, argument):
        if event == "return":
            self.windows -= 1
            if frame.f_code.co_name == "get_quant_method":
                self.returns.append((argument, location(frame)))
        return self._watch_window

    def _watch_init(self, frame, event, argument):
        if event == "return":
            self.constructing.pop()
        return self._watch_init

    def decided_at(self, method):
        """The return statement of the innermost get_quant_method that gave `method`."""
        for value, where in self.returns:
            if value is not None and value is method:
                return where
        return self.assigned[1] if self.assigned else None

    def reads_for(self, method):
        """Flags read for `method`: not those that another object's construction read."""
        return [flag for flag, inside in self.reads if all(one is method for one in inside)]


def both(first, second):
    """A local trace function that serves two."""
    state = [first, second]

    def local(frame, event, argument):
        for index, function in enumerate(state):
            if function is not None:
                state[index] = function(frame, event, argument)
        return local

    return local
