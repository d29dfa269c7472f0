"""`dsv4doctor.toml`, or `[tool.dsv4doctor]` of pyproject.toml: targets and suppressions."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import date, datetime
from pathlib import Path
from typing import Any, NoReturn

from dsv4doctor.errors import UsageError
from dsv4doctor.facts.files import regular_size, shown
from dsv4doctor.gate import Suppression
from dsv4doctor.models import ARCHS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NAME = "dsv4doctor.toml"


@dataclass(frozen=True)
class TargetConfig:
    """One launch to look at; None: not said here.  Paths are made absolute."""

    name: str | None = None
    model: str | None = None
    launch: str | None = None
    """A script or `script:LINE`."""
    flags: tuple[str, ...] | None = None
    snapshot: str | None = None
    arch: str | None = None
    sglang: str | None = None
    python: str | None = None
    env: tuple[str, ...] = ()
    """KEY=VALUE each."""
    fail_on: str | None = None
    strict: bool | None = None


@dataclass(frozen=True)
class Config:
    source: str
    """The file, as it is called in messages."""
    targets: tuple[TargetConfig, ...] = (TargetConfig(),)
    """At least one."""
    defaults: TargetConfig = TargetConfig()
    """What the file says outside its targets."""
    baseline: str | None = None
    suppressions: tuple[Suppression, ...] = ()


def find(start: Path) -> Path | None:
    """The nearest configuration in `start` or above it."""
    for folder in (start, *start.parents):
        own, project = folder / NAME, folder / "pyproject.toml"
        # not Path.is_file: it raises for a folder that we may not look into
        if os.path.isfile(own):
            return own
        if os.path.isfile(project) and _is_ours(project):
            return project
    return None


def _is_ours(project: Path) -> bool:
    try:
        return "tool.dsv4doctor" in project.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False  # somebody else's, and we were not asked to read it


def read(path: Path) -> Config:
    """The configuration in `path`; UsageError names the file, the key and what is wrong."""
    if regular_size(path, "see --config") > _LIMIT:
        raise UsageError(f"{path}: over {_LIMIT >> 20} MiB", "see --config")
    try:
        plain = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})", "see --config") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 (byte {error.start})") from error
    except RecursionError as error:
        raise UsageError(f"{path}: nested too deeply") from error
    except ValueError as error:  # TOMLDecodeError, and what int() and dates refuse
        said = str(error).partition(";")[0]
        raise UsageError(f"{path}: not TOML ({shown(said)})") from error
    if path.name == "pyproject.toml":
        tool = plain.get("tool", {})
        plain = tool.get("dsv4doctor", {}) if isinstance(tool, dict) else {}
    return _Reader(path).config(plain)


# ------------------------------------------------------------------------------ keys

_LIMIT = 1 << 20  # bytes
_ARCHS = ("auto", *ARCHS)
_FAIL_ON = ("error", "warning", "never")
_SETTINGS = (
    *("model", "launch", "flags", "snapshot", "arch", "sglang", "python"),
    *("env", "fail_on", "strict"),
)
_TOP = (*_SETTINGS, "baseline", "target", "suppress")
_SUPPRESS = ("rule", "subject", "target", "reason", "expires")


@dataclass(frozen=True)
class _Reader:
    path: Path

    def config(self, plain: Any) -> Config:
        table = self._table(plain, "", _TOP)
        defaults = self._settings(table, "")
        targets = tuple(
            target
            for index, one in enumerate(self._tables(table, "target"), 1)
            for target in self._targets(one, f"target {index}", defaults)
        )
        if "target" in table and table.get("launch") is not None:
            self._wrong("launch", "is also in [[target]]", "write it in one place")
        named = [target.name for target in targets]
        twice = next((name for name in named if named.count(name) > 1), None)
        if twice is not None:
            self._wrong("target", f"two are called {twice!r}", "give each a name of its own")
        if not targets:
            targets = self._each_script({**table, "name": None}, "", defaults)
        baseline = self._text(table, "baseline", "")
        rows = enumerate(self._tables(table, "suppress"), 1)
        return Config(
            source=str(self.path),
            targets=targets,
            defaults=defaults,
            baseline=self._file(baseline) if baseline else None,
            suppressions=tuple(self._suppression(row, index, named) for index, row in rows),
        )

    def _targets(self, plain: Any, where: str, defaults: TargetConfig) -> tuple[TargetConfig, ...]:
        table = self._table(plain, where, (*_SETTINGS, "name"))
        if not self._text(table, "name", where):
            self._wrong(f"{where}: name", "is missing", 'write name = "production"')
        return self._each_script(table, where, defaults)

    def _each_script(
        self, table: Mapping[str, Any], where: str, defaults: TargetConfig
    ) -> tuple[TargetConfig, ...]:
        """The target, once for each of its launch scripts."""
        name = self._text(table, "name", where)
        base = _over(defaults, replace(self._settings(table, where), name=name))
        scripts = table.get("launch")
        if not isinstance(scripts, list):
            return (base,)
        words = self._texts(table, "launch", where) or ()
        if not words:
            self._wrong(_key(where, "launch"), "is an empty list", 'write launch = "serve.sh"')
        named = [f"{name}: {word}" if name else word for word in words]
        return tuple(
            replace(base, name=called, launch=self._file(word))
            for called, word in zip(named, words, strict=True)
        )

    def _settings(self, table: Mapping[str, Any], where: str) -> TargetConfig:
        def text(key: str, allowed: tuple[str, ...] | None = None) -> str | None:
            return self._text(table, key, where, allowed)

        if table.get("launch") and table.get("flags"):
            hint = "leave one of the two out: a script has its own flags"
            self._wrong(_key(where, "launch"), "given together with flags", hint)
        model, launch, sglang = text("model"), None, text("sglang")
        if not isinstance(table.get("launch"), list):
            launch = text("launch")
        python, snapshot = text("python"), text("snapshot")
        return TargetConfig(
            model=self._file_if_there(model) if model else None,
            launch=self._file(launch) if launch else None,
            flags=self._texts(table, "flags", where),
            snapshot=self._file(snapshot) if snapshot else None,
            arch=text("arch", _ARCHS),
            sglang=self._file_if_there(sglang) if sglang else None,
            python=self._file(python) if python else None,
            env=self._env(table, where),
            fail_on=text("fail_on", _FAIL_ON),
            strict=self._value(table, "strict", where, bool, "true or false"),
        )

    def _suppression(self, plain: Any, index: int, targets: list[str | None]) -> Suppression:
        where = f"suppress {index}"
        table = self._table(plain, where, _SUPPRESS)
        rule = self._needed(table, "rule", where, 'write rule = "DSV103"')
        reason = self._needed(table, "reason", where, "say why the finding is accepted")
        target = self._text(table, "target", where)
        if target is not None and target not in targets:
            self._wrong(f"{where}: target", f"there is no target {target!r}", "see [[target]]")
        return Suppression(
            rule=rule,
            reason=reason,
            expires=self._date(table, where),
            source=f"{self.path.name}: {where}",
            subject=self._text(table, "subject", where) or "*",
            target=target,
        )

    # -------------------------------------------------------------------------- values

    def _wrong(self, key: str, problem: str, hint: str | None = None) -> NoReturn:
        raise UsageError(f"{self.path}: {key}: {problem}", hint)

    def _table(self, plain: Any, where: str, keys: tuple[str, ...]) -> Mapping[str, Any]:
        if not isinstance(plain, dict):
            self._wrong(where or "tool.dsv4doctor", "should be a table")
        for key in plain:
            if key not in keys:
                hint = f"keys here: {', '.join(keys)}"
                self._wrong(_key(where, key), "is not a key that dsv4doctor knows", hint)
        return plain

    def _tables(self, table: Mapping[str, Any], key: str) -> list[Any]:
        rows = table.get(key, [])
        if not isinstance(rows, list):
            self._wrong(key, "should be a list of tables", f"write [[{key}]]")
        return rows

    def _value(
        self, table: Mapping[str, Any], key: str, where: str, kind: type, should_be: str
    ) -> Any:
        value = table.get(key)
        if value is not None and not isinstance(value, kind):
            self._wrong(_key(where, key), f"should be {should_be}, is {value!r}")
        if _has_nul(value):
            self._wrong(_key(where, key), "holds a NUL character")
        return value

    def _text(
        self,
        table: Mapping[str, Any],
        key: str,
        where: str,
        allowed: tuple[str, ...] | None = None,
    ) -> str | None:
        value: str | None = self._value(table, key, where, str, "a string")
        if value is not None and allowed is not None and value not in allowed:
            self._wrong(_key(where, key), f"should be one of {', '.join(allowed)}, is {value!r}")
        return value

    def _needed(self, table: Mapping[str, Any], key: str, where: str, hint: str) -> str:
        value = (self._text(table, key, where) or "").strip()
        if not value:
            self._wrong(f"{where}: {key}", "is missing", hint)
        return value

    def _texts(self, table: Mapping[str, Any], key: str, where: str) -> tuple[str, ...] | None:
        value = self._value(table, key, where, list, "a list of strings")
        if value is not None and not all(isinstance(word, str) for word in value):
            self._wrong(_key(where, key), "should be a list of strings")
        return None if value is None else tuple(value)

    def _env(self, table: Mapping[str, Any], where: str) -> tuple[str, ...]:
        pairs = self._value(table, "env", where, dict, "a table of strings") or {}
        for name, value in pairs.items():
            if not name.isidentifier() or not isinstance(value, str):
                self._wrong(_key(where, f"env.{name}"), "should be a variable with a string")
        return tuple(f"{name}={value}" for name, value in pairs.items())

    def _date(self, table: Mapping[str, Any], where: str) -> date:
        hint = "write expires = 2026-12-31, the last day it holds"
        value = table.get("expires")
        if value is None:
            self._wrong(f"{where}: expires", "is missing", hint)
        if isinstance(value, date) and not isinstance(value, datetime):
            return value
        try:
            return datetime.strptime(value, "%Y-%m-%d").date()
        except (TypeError, ValueError):
            self._wrong(f"{where}: expires", f"{str(value)!r} is not a date", hint)

    def _file(self, named: str) -> str:
        """A path as seen from the configuration's folder."""
        path = Path(os.path.expanduser(named))
        joined = path if path.is_absolute() else self.path.parent / path
        try:
            return str(joined.relative_to(Path.cwd()))
        except (ValueError, OSError):
            return str(joined)

    def _file_if_there(self, named: str) -> str:
        """The same for what can also be a release or a Hugging Face id."""
        path = self._file(named)
        return path if os.path.exists(path) or named.startswith((".", "/", "~")) else named


def _has_nul(value: Any) -> bool:
    """True for a text, or texts, that no file and no variable can be called."""
    if isinstance(value, dict):
        return any(_has_nul(item) for pair in value.items() for item in pair)
    if isinstance(value, list):
        return any(_has_nul(item) for item in value)
    return isinstance(value, str) and "\0" in value


def _key(where: str, key: str) -> str:
    return f"{where}: {key}" if where else key


def _over(defaults: TargetConfig, target: TargetConfig) -> TargetConfig:
    """`target` with what it does not say from `defaults`."""
    said = {name: value for name, value in vars(target).items() if value is not None}
    if target.launch is not None or target.flags is not None:
        said |= {"launch": target.launch, "flags": target.flags}
    return replace(defaults, **{**said, "env": (*defaults.env, *target.env)})
