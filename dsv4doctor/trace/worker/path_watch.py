"""The decision path: every branch on the way to a quant method, when asked for."""

import ast
import inspect
import linecache
import re
import sys
import textwrap

from .recorder import location

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
