"""Which lines of SGLang changed its arguments and its environment."""

import linecache
import os
import sys

from .layer_watch import both
from .recorder import location


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
        return both(ours, chained) if chained else ours

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
