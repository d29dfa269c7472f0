"""What the fixes share: find one function of a file, look at it and change it with libcst.

Only the function is parsed by libcst; the rest of the file is carried over as it is, byte for byte.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import libcst as cst
import libcst.matchers as m
from libcst.metadata import MetadataWrapper, PositionProvider

from dsv4doctor.fixes.fix import Present, Refused, Sources
from dsv4doctor.models import Location

Edit = Callable[[cst.CSTNode], cst.CSTNode]


@dataclass(frozen=True)
class Piece:
    """A function or class of a file, as it stands there (indented)."""

    file: str
    name: str
    """Qualified, e.g. "HybridFp8NvFp4Config.get_quant_method"."""
    start: int
    """Its first line in the file, from 1; of the decorators if there are any."""
    text: str
    newline: str

    @functools.cached_property
    def wrapper(self) -> MetadataWrapper:
        """libcst's view.  What is indented stands under an `if` that `text_of` takes off again."""
        config = cst.PartialParserConfig(default_indent="    ", default_newline=self.newline)
        head = f"if 1:{self.newline}" if self.text[:1].isspace() else ""
        return MetadataWrapper(cst.parse_module(head + self.text, config), unsafe_skip_copy=True)

    @property
    def module(self) -> cst.Module:
        return self.wrapper.module

    @property
    def _ahead(self) -> int:
        return 1 if self.text[:1].isspace() else 0

    def text_of(self, module: cst.Module) -> str:
        code = module.code
        return code.partition(self.newline)[2] if self._ahead else code

    def lines_of(self, node: cst.CSTNode) -> tuple[int, int]:
        """First and last line of `node`, one of `module`, in the file."""
        where = self.wrapper.resolve(PositionProvider)[node]
        ahead = self.start - 1 - self._ahead
        return where.start.line + ahead, where.end.line + ahead

    def at(self, node: cst.CSTNode) -> Location:
        line, _ = self.lines_of(node)
        source = lines_in(self.text)[line - self.start].strip()
        return Location(self.file, line, self.name, source)

    def find(self, matcher: m.BaseMatcherNode) -> list[cst.CSTNode]:
        """The nodes that match, in the order of the source."""
        found = m.findall(self.module, matcher)
        return sorted(found, key=lambda node: self.lines_of(node))

    def source(self, node: cst.CSTNode) -> str:
        """The lines of `node` in the file, without their common indentation."""
        first, last = self.lines_of(node)
        lines = lines_in(self.text)[first - self.start : last - self.start + 1]
        margin = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
        return "\n".join(line[margin:].rstrip() for line in lines)

    def replaced(self, nodes: Sequence[tuple[cst.CSTNode, Edit]]) -> str:
        """The piece's text with each of its nodes changed."""
        module = self.module.visit(_Replace(nodes))
        assert isinstance(module, cst.Module)
        return self.text_of(module)


class _Replace(cst.CSTTransformer):
    def __init__(self, nodes: Sequence[tuple[cst.CSTNode, Edit]]) -> None:
        self.edits = {id(node): edit for node, edit in nodes}

    def on_leave(  # type: ignore[override]
        self, original_node: cst.CSTNode, updated_node: cst.CSTNode
    ) -> cst.CSTNode:
        edit = self.edits.get(id(original_node))
        return updated_node if edit is None else edit(updated_node)


def find_piece(sources: Sources, file: str, name: str) -> Piece | None:
    """The function or class of that qualified name; None where the file lacks it."""
    text, tree = sources.get(file, ""), parsed(sources, file)
    if tree is None:
        return None
    scope: ast.AST = tree
    for part in name.split("."):
        node = next((node for node in _definitions(scope) if node.name == part), None)
        if node is None:
            return None
        scope = node
    assert isinstance(scope, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)
    start = min([scope.lineno, *(decorator.lineno for decorator in scope.decorator_list)])
    lines = lines_in(text)
    body = "".join(lines[start - 1 : scope.end_lineno])
    return Piece(file, name, start, body, "\r\n" if "\r\n" in body else "\n")


def lines_in(text: str) -> list[str]:
    """Its lines with their ends, as Python counts them: `str.splitlines` takes a form feed and
    characters inside of strings for ends too."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _definitions(scope: ast.AST) -> Iterator[Definition]:
    """The functions and classes that `scope` itself defines, under an `if` or `with` or not."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, Definition):
            yield node
        elif isinstance(node, ast.stmt | ast.ExceptHandler):
            yield from _definitions(node)


def find_methods(sources: Sources, file: str, name: str) -> Iterator[Piece]:
    """Every method of that name, whichever class of the file has it."""
    for node in getattr(parsed(sources, file), "body", ()):
        if isinstance(node, ast.ClassDef):
            piece = find_piece(sources, file, f"{node.name}.{name}")
            if piece is not None:
                yield piece


def with_piece(sources: Sources, piece: Piece, new: str) -> str:
    """The whole text of the piece's file with `new` in its place."""
    lines = lines_in(sources[piece.file])
    count = len(lines_in(piece.text))
    return "".join([*lines[: piece.start - 1], new, *lines[piece.start - 1 + count :]])


def parsed(sources: Sources, file: str) -> ast.Module | None:
    """The file's syntax tree, for questions that change nothing; None: absent or no Python."""
    return _tree(sources[file]) if file in sources else None


@functools.lru_cache(maxsize=16)
def _tree(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return None


def names_in(tree: ast.AST | None) -> set[str]:
    """Every name and attribute that a tree mentions."""
    if tree is None:
        return set()
    return {
        node.id if isinstance(node, ast.Name) else node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Name | ast.Attribute)
    }


def imported_names(tree: ast.AST | None) -> set[str]:
    """What the module-level imports of a file bind."""
    return {
        alias.asname or alias.name
        for node in getattr(tree, "body", ())
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }


# ------------------------------------------------------------------------ what is written


def statements(code: str, newline: str = "\n") -> list[cst.BaseStatement]:
    """Statements to put into a body, their comments and blank lines with them."""
    config = cst.PartialParserConfig(default_indent="    ", default_newline=newline)
    module = cst.parse_module(code.replace("\n", newline), config).visit(_BareBlankLines())
    assert isinstance(module, cst.Module)
    first, *rest = module.body
    lines = [*module.header, *getattr(first, "leading_lines", ())]
    return [first.with_changes(leading_lines=lines), *rest]


class _BareBlankLines(cst.CSTTransformer):
    """Blank lines get no indentation when they are put into a body."""

    def leave_EmptyLine(
        self, original_node: cst.EmptyLine, updated_node: cst.EmptyLine
    ) -> cst.EmptyLine:
        return updated_node.with_changes(indent=updated_node.comment is not None)


def put_before(new: str, newline: str = "\n") -> Edit:
    """`new` in front of the statement that is edited; a blank line at its end is kept."""

    def edit(node: cst.CSTNode) -> cst.CSTNode:
        if new.endswith("\n\n"):
            lines = [cst.EmptyLine(indent=False), *getattr(node, "leading_lines", ())]
            node = node.with_changes(leading_lines=lines)
        return cst.FlattenSentinel([*statements(new, newline), node])  # type: ignore[return-value]

    return edit


def put_after(new: str, newline: str = "\n") -> Edit:
    """`new` behind the statement that is edited."""

    def edit(node: cst.CSTNode) -> cst.CSTNode:
        return cst.FlattenSentinel([node, *statements(new, newline)])  # type: ignore[return-value]

    return edit


def in_place(new: str, newline: str = "\n") -> Edit:
    """`new` instead of the statement that is edited, below the comments in front of it."""

    def edit(node: cst.CSTNode) -> cst.CSTNode:
        first, *rest = statements(new, newline)
        ahead = getattr(node, "leading_lines", ())
        lines = [*ahead, *getattr(first, "leading_lines", ())]
        return cst.FlattenSentinel([first.with_changes(leading_lines=lines), *rest])  # type: ignore[return-value]

    return edit


def from_ours(fix: str, module: str, name: str) -> str:
    """Statements that import `name` from our adapter, and say what to run where it is gone."""
    return f"""\
try:
    from dsv4doctor.kernels.adapters.{module} import (
        {name},
    )
except ImportError as error:
    raise RuntimeError(
        f"SGLang is patched by dsv4doctor ({fix}), not importable here ({{error}}): "
        "run `pip install dsv4doctor`, or with it `dsv4doctor fix --revert`"
    ) from error
"""


# ------------------------------------------------------------------------ outcomes


def own_mark(sources: Sources, files: Sequence[str], fix: str) -> Present | None:
    """Present where a file carries the fix's comment already."""
    for file in files:
        text = sources.get(file, "")
        if f"dsv4doctor {fix}" not in text:
            continue
        for number, line in enumerate(lines_in(text), 1):
            if re.search(rf"#\s*dsv4doctor {fix}\b", line):
                return Present(Location(file, number, source=line.strip()), "applied by dsv4doctor")
    return None


def refused(piece: Piece, node: cst.CSTNode | None, expected: str, reason: str) -> Refused:
    """The structure at `node` (None: the whole piece) is not the expected one."""
    found = piece.source(node) if node is not None else piece.text.rstrip()
    return Refused(piece.file, expected.rstrip("\n"), found, f"{piece.name}: {reason}")
