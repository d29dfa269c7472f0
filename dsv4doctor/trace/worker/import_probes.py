"""Who asks for a module: a probe that handles a no, a try that catches it, or nobody."""

import ast
import linecache
import re
import sys


def is_probe():
    """True inside importlib.util.find_spec: the caller asks, and handles a no."""
    frame = sys._getframe(2)
    while frame is not None and "importlib" in frame.f_code.co_filename:
        if frame.f_code.co_name == "find_spec" and "util" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def inside_try(filename, line):
    """True when `line` of a source file stands in a try that can catch an ImportError.

    Read by indentation: parsing SGLang's largest files would cost more than importing them.
    """
    lines = linecache.getlines(filename)
    if not 0 < line <= len(lines):
        return False
    indentation = _indentation(lines[line - 1])
    for above in range(line - 2, -1, -1):
        text = lines[above].strip()
        depth = _indentation(lines[above])
        if not text or text.startswith("#") or depth >= indentation:
            continue
        indentation = depth
        if text.startswith("try:") and _catches_import_error(lines, above, depth):
            return True
    return False


def _catches_import_error(lines, start, depth):
    """True when the try at `start` has an except clause that an ImportError reaches."""
    for text in lines[start + 1 :]:
        stripped = text.strip()
        if not stripped or _indentation(text) > depth:
            continue
        if not stripped.startswith("except"):
            return False
        if _IMPORT_ERRORS.search(stripped):
            return True
    return False


_IMPORT_ERRORS = re.compile(
    r"except\s*:|\b(ImportError|ModuleNotFoundError|Exception|BaseException)\b"
)


def _indentation(text):
    return len(text) - len(text.lstrip())


def imports_of(path):
    """(root, line) of what a source file imports whenever it is imported: its outermost statements.

    Nothing for a file that is not there or cannot be read as Python.
    """
    try:
        with open(path, "rb") as source:
            statements = ast.parse(source.read()).body
    except (OSError, SyntaxError, ValueError):
        return []
    found = []
    for one in statements:
        if isinstance(one, ast.Import):
            found += [(alias.name.partition(".")[0], one.lineno) for alias in one.names]
        elif isinstance(one, ast.ImportFrom) and not one.level:
            found.append((one.module.partition(".")[0], one.lineno))
    return found
