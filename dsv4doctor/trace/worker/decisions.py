"""Watches SGLang decide: which line chose a layer's quant method, which flags it read, which
lines changed the arguments, and, when asked, every branch on the way.
"""

import ast
import inspect
import linecache
import os
import re
import sys
import textwrap

from .recorder import location

# What a call of these means to somebody who sets flags.
_FLAG_READERS = {
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
        return _both(ours, chained) if chained else ours

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
        if name in _FLAG_READERS:
            self._read(_FLAG_READERS[name])
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


def _both(first, second):
    """A local trace function that serves two."""
    state = [first, second]

    def local(frame, event, argument):
        for index, function in enumerate(state):
            if function is not None:
                state[index] = function(frame, event, argument)
        return local

    return local


# ------------------------------------------------------------------------ arguments


class ArgumentWatch:
    """Which line changed an argument while SGLang resolved them, for `fields`."""

    def __init__(self, fields):
        self.fields = frozenset(fields)
        self.changes = []
        self.returned = {}

    def __enter__(self):
        from sglang.srt.server_args import ServerArgs

        self.cls = ServerArgs
        self.own = ServerArgs.__dict__.get("__setattr__")
        original = ServerArgs.__setattr__
        watch = self

        def noted(record, name, value):
            if name in watch.fields and name in record.__dict__:
                before = record.__dict__[name]
                if before != value:
                    watch._note(name, before, value, watch._origin(name, value, sys._getframe(1)))
            original(record, name, value)

        ServerArgs.__setattr__ = noted
        self.outer = sys.gettrace()
        sys.settrace(self._on_call)
        return self

    def __exit__(self, *exc):
        sys.settrace(self.outer)
        if self.own is None:
            del self.cls.__setattr__
        else:
            self.cls.__setattr__ = self.own

    def _origin(self, name, value, frame):
        """The line that set the field; for one set by generic code, the line that declared it."""
        frame = _outside(frame)
        if frame is None or name in linecache.getline(frame.f_code.co_filename, frame.f_lineno):
            return location(frame)
        return self.returned.get((name, repr(value))) or location(frame)

    def _note(self, name, before, after, where):
        self.changes.append(
            {"name": name, "before": plain(before), "after": plain(after), "at": where}
        )

    def _on_call(self, frame, event, argument):
        chained = self.outer(frame, event, argument) if self.outer else None
        if frame.f_code.co_name == "declare_resolution":
            for name, value in frame.f_locals.get("fields", {}).items():
                self.returned.setdefault((name, repr(value)), location(frame.f_back))
            return chained
        if "/sglang/srt/arg_groups/" not in frame.f_code.co_filename:
            return chained
        ours = self._provider()
        return _both(ours, chained) if chained else ours

    def _provider(self):
        """Follows one override provider; remembers the lines that named a returned field."""
        lines = []

        def local(frame, event, argument):
            if event == "line":
                lines.append(frame.f_lineno)
            elif event == "return" and isinstance(argument, dict):
                for name in self.fields & argument.keys():
                    self._remember(name, argument[name], frame, lines)
            return local

        return local

    def _remember(self, name, value, frame, lines):
        filename = frame.f_code.co_filename
        for line in reversed(lines):
            if name in linecache.getline(filename, line):
                where = location(frame)
                where["line"] = line
                self.returned.setdefault((name, repr(value)), where)
                return

    def finish(self, server_args):
        """All changes, those that later releases declare beside the record included."""
        current = {name: getattr(server_args, name, None) for name in self.fields}
        for _, declared in getattr(server_args, "_resolved_overrides", None) or ():
            for name in sorted(self.fields & declared.keys()):
                value = declared[name]
                if current.get(name) != value:
                    where = self.returned.get((name, repr(value)))
                    self._note(name, current.get(name), value, where)
                    current[name] = value
        return self.changes


def _outside(frame):
    """The caller that set a field, past dataclass and helper plumbing."""
    while frame is not None and (
        frame.f_code.co_filename.startswith("<") or frame.f_code.co_name == "__setattr__"
    ):
        frame = frame.f_back
    return frame


def plain(value):
    """A value as Python would write it, shortened; None stays None."""
    if value is None:
        return None
    return value if isinstance(value, str) else repr(value)[:200]


# ------------------------------------------------------------------------ decision path

_FILES = (
    "sglang/srt/layers/quantization/",
    "sglang/srt/layers/moe/",
    "sglang/srt/arg_groups/",
    "sglang/srt/server_args.py",
    "sglang/srt/model_loader/loader.py",
    "sglang/srt/configs/model_config.py",
    "sglang/srt/models/deepseek_v4",
)
_FUNCTIONS = re.compile(
    r"get_quant_method|_get_quant_method|create_moe_runner|_get_quantization_config"
    r"|is_layer_excluded|is_layer_skipped|get_moe_impl_class|initialize_moe_config"
    r"|speculative_moe_backend_context|\w*moe_runner_backend\w*|\w*moe_kernel\w*"
    r"|\w*deepseek_v4\w*|\w*sm120\w*|_handle_speculative_decoding|handle_speculative\w*"
    r"|_handle_model_specific_adjustments|\w*fp4_expert\w*|\w*nvfp4_moe\w*"
)
_OF_A_LAYER = {
    "__init__",
    "get_quant_method",
    "_get_quant_method",
    "is_layer_excluded",
    "is_layer_skipped",
    "create_moe_runner",
}
_SIMPLE = (bool, int, float, str)


class PathWatch:
    """The decision path: each dispatch function that ran, with the branches it took."""

    def __init__(self):
        self.phase = "arguments"
        self.inside_layer = False  # dense layers ask the same functions, and are not asked about
        self.steps = []
        self.kinds = {}
        self.conditions = {}

    def __enter__(self):
        self.outer = sys.gettrace()
        sys.settrace(self._on_call)
        return self

    def __exit__(self, *exc):
        sys.settrace(self.outer)

    def _on_call(self, frame, event, argument):
        code = frame.f_code
        watched = self.kinds.get(code)
        if watched is None:
            watched = self.kinds[code] = self._is_dispatch(code)
        if not watched or (code.co_name in _OF_A_LAYER and not self.inside_layer):
            return None
        return self._follow(frame)

    @staticmethod
    def _is_dispatch(code):
        position = code.co_filename.rfind("/sglang/")
        name = code.co_filename[position + 1 :]
        if position < 0 or not name.startswith(_FILES):
            return False
        qualified = getattr(code, "co_qualname", code.co_name)
        if code.co_name == "__init__":
            return "/quantization/" in name and "moe" in qualified.lower()
        return _FUNCTIONS.fullmatch(code.co_name) is not None

    def _follow(self, frame):
        code = frame.f_code
        step = {
            "phase": self.phase,
            "function": getattr(code, "co_qualname", code.co_name),
            "file": code.co_filename,
            "branches": [],
            "returned": None,
            "times": 1,
        }
        self.steps.append(step)
        conditions = self._conditions(code)
        last = [None]

        def local(frame, event, argument):
            if event == "line":
                self._resolve(step, frame.f_lineno)
                condition = conditions.get(frame.f_lineno)
                if condition is not None and condition is not last[0]:
                    step["branches"].append(_branch(frame, condition))
                last[0] = condition
            elif event == "exception" and not issubclass(argument[0], StopIteration):
                self._raised(step)
            elif event == "return":
                step["returned"] = _returned(argument)
                self._resolve(step, None)
            return local

        return local

    @staticmethod
    def _resolve(step, line):
        """The line that runs after a condition, None: there is none, tells which way it went."""
        branch = _open(step)
        if branch is None or (line is not None and branch["first"] <= line <= branch["last"]):
            return
        first, last = branch.pop("body")
        inside = line is not None and first <= line <= last
        branch["taken"] = inside != branch["asserts"]

    @staticmethod
    def _raised(step):
        """The assertion does not hold; of another condition the value was not reached."""
        branch = _open(step)
        if branch is not None:
            del branch["body"]
            branch["taken"] = False if branch["asserts"] else None

    def _conditions(self, code):
        """line -> condition of the if, while or conditional expression on it."""
        if code not in self.conditions:
            self.conditions[code] = _read_conditions(code)
        return self.conditions[code]

    def result(self):
        """The steps; those that took the same way are folded into the first, with a count."""
        folded = {}
        for step in self.steps:
            branches = {}
            for branch in step["branches"]:
                branches[branch["first"], branch["taken"]] = branch  # of a loop, the last round
            step["branches"] = list(branches.values())
            key = (step["phase"], step["file"], step["function"], step["returned"], *branches)
            if key in folded:
                folded[key]["times"] += 1
            else:
                folded[key] = step
        for step in folded.values():
            for branch in step["branches"]:
                for internal in ("first", "last", "body", "asserts"):
                    branch.pop(internal, None)
        return list(folded.values())


def _read_conditions(code):
    try:
        lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
        tree = ast.parse(textwrap.dedent("".join(inspect.getblock(lines))))
    except (SyntaxError, IndexError):
        return {}
    offset = code.co_firstlineno - 1
    conditions = {}
    for node in ast.walk(tree):
        test = getattr(node, "test", None)
        if test is None:
            continue
        body = getattr(node, "body", None)
        block = None
        if isinstance(body, list):
            block = (body[0].lineno + offset, body[-1].end_lineno + offset)
        elif isinstance(node, ast.Assert):
            # What runs when it does not hold; a message on the line of the test runs unseen.
            message = node.msg or node.test
            block = (message.lineno + offset, (message.end_lineno or 0) + offset)
        condition = {
            "text": ast.unparse(test)[:300],
            "names": sorted(
                {
                    ast.unparse(part)
                    for part in ast.walk(test)
                    if isinstance(part, (ast.Attribute, ast.Name))
                }
            ),
            "first": min(node.lineno, test.lineno) + offset,
            "last": (test.end_lineno or test.lineno) + offset,
            "body": block,
            "asserts": isinstance(node, ast.Assert),
        }
        for line in range(condition["first"], condition["last"] + 1):
            conditions.setdefault(line, condition)
    return conditions


def _open(step):
    """The last condition, if which way it went is not known yet."""
    branch = step["branches"][-1] if step["branches"] else None
    return branch if branch is not None and "body" in branch else None


def _branch(frame, condition):
    tracing = sys.gettrace()
    sys.settrace(None)
    try:
        values = {name: _value(frame, name) for name in condition["names"]}
    finally:
        sys.settrace(tracing)
    where = location(frame)
    where["line"] = condition["first"]
    branch = {
        "location": where,
        "condition": condition["text"],
        "values": {name: value for name, value in values.items() if value is not None},
        "taken": None,
        "first": condition["first"],
        "last": condition["last"],
        "asserts": condition["asserts"],
    }
    if condition["body"] is not None:
        branch["body"] = condition["body"]
    return branch


_UNKNOWN = object()


def _value(frame, dotted):
    """The value of a name in a condition, when looking at it runs no code of its own."""
    head, *rest = dotted.split(".")
    called = head == "get_platform()"
    head = head.removesuffix("()") if called else head
    value = frame.f_locals.get(head, frame.f_globals.get(head, _UNKNOWN))
    if called and value is not _UNKNOWN:
        value = value()
    if not rest and hasattr(value, "cache_info"):  # a cached predicate such as is_sm120_supported
        try:
            return f"() -> {value()!r}"
        except Exception:
            return None
    for name in rest:
        if value is _UNKNOWN or not name.isidentifier():
            return None
        value = _attribute(value, name)
    if type(value).__module__ == "sglang.srt.environ" and hasattr(value, "get"):
        return f"{value.get()!r}"[:120]
    if value is None or isinstance(value, _SIMPLE):
        return repr(value)[:120]
    if hasattr(value, "name") and type(value).__module__.startswith("sglang"):
        return str(value)[:120]
    return None


def _attribute(value, name):
    """An attribute, read plainly; SGLang's own views and platforms compute theirs."""
    plain_value = inspect.getattr_static(value, name, _UNKNOWN)
    if plain_value is not _UNKNOWN and not isinstance(plain_value, property):
        return plain_value if not hasattr(plain_value, "__get__") else getattr(value, name)
    if type(value).__module__.startswith("sglang.srt."):
        try:
            return getattr(value, name)
        except Exception:
            return _UNKNOWN
    return _UNKNOWN


def _returned(value):
    if value is None or isinstance(value, (*_SIMPLE, dict)):
        return repr(value)[:160]
    return type(value).__name__


def environment_watch(interesting):
    """Records what SGLang writes into its own environment: name -> (before, after).

    An audit hook, so it stays for the life of the process; `interesting(name)` filters.
    """
    written = {}

    def hook(event, args):
        if event != "os.putenv":
            return
        name, after = (os.fsdecode(arg) for arg in args)
        if interesting(name):
            before = written[name][0] if name in written else os.environ.get(name)
            if before != after:
                written[name] = (before, after)

    sys.addaudithook(hook)
    return written
