"""Records, while a trace is in a recording phase, which native entry points were called."""

import sys
from dataclasses import dataclass, field

OUR_FILES = __file__.rsplit("/", 1)[0]


@dataclass
class Recorder:
    """Calls into native code, in order, as {"symbol", "file", "line", "function"}."""

    active: bool = False
    stacks: bool = False
    calls: list = field(default_factory=list)

    def start(self, stacks=False):
        """`stacks`: keep with every call the SGLang functions it was made from."""
        self.active, self.stacks, self.calls = True, stacks, []

    def stop(self):
        self.active = False
        calls, self.calls = self.calls, []
        return calls

    def note(self, symbol, frame):
        if self.active and len(self.calls) < 400:
            self.calls.append({"symbol": symbol, "at": location(frame)})
            if self.stacks:
                self.calls[-1]["stack"] = stack_of(frame)


def calling_frame(depth=2):
    """The nearest frame that is neither ours, nor torch's, nor the import system's."""
    frame = sys._getframe(depth)
    while frame is not None and _is_plumbing(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _is_plumbing(filename):
    return (
        filename.startswith((OUR_FILES, "<"))
        or "/torch/" in filename
        or "/triton/" in filename
        or "/importlib/" in filename
    )


def stack_of(frame):
    """SGLang's functions from a frame outwards, at most 16: [(name, file, line)]."""
    stack = []
    while frame is not None and len(stack) < 16:
        code = frame.f_code
        if "/sglang/" in code.co_filename:
            stack.append((code.co_name, code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return stack


def location(frame):
    """{"file", "line", "function"} of a frame; None without one."""
    if frame is None:
        return None
    return {
        "file": frame.f_code.co_filename,
        "line": frame.f_lineno,
        "function": getattr(frame.f_code, "co_qualname", frame.f_code.co_name),
    }


RECORDER = Recorder()
