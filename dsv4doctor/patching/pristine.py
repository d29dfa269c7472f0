"""Whether a file of a tree is as its release had it: by the wheel's RECORD, else by git."""

from __future__ import annotations

import base64
import csv
import hashlib
import os
import subprocess
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

_GIT_SECONDS = 20.0


@dataclass(frozen=True)
class Judge:
    """What a tree's files are held against."""

    record: Mapping[str, Collection[str]]
    """File -> sha256 as RECORD writes it (urlsafe base64, no padding); empty: no RECORD.

    Several where a release was unpacked over another one."""
    root: Path

    def of(self, file: str, content: bytes) -> bool | None:
        """True when `content` is the release's (or the checkout's HEAD) for `file`; None: unknown.

        A file that an existing RECORD does not list, or lists without a hash, is unknown too.
        """
        listed = self.record.get(file)
        if listed is not None:
            digest = hashlib.sha256(content).digest()
            return base64.urlsafe_b64encode(digest).rstrip(b"=").decode() in listed
        return None if self.record else _as_in_git(self.root, file, content)

    def lacks(self, file: str) -> bool:
        """True when the release, or the checkout's HEAD, is known to have no such file."""
        if self.record:
            return file not in self.record
        tree, listed = (
            _git(self.root, "ls-tree", "--name-only", "HEAD", "--", f"./{name}")
            for name in ("sglang", file)
        )
        return bool(tree) and listed == b""


def judge(root: Path) -> Judge:
    return Judge(_record(root), root)


def _record(root: Path) -> dict[str, set[str]]:
    """The hashes of sglang's own RECORD in `root`; empty for an editable install."""
    found: dict[str, set[str]] = {}
    try:
        for path in sorted(root.glob("sglang-*.dist-info/RECORD")):
            with path.open(encoding="utf-8", newline="") as lines:
                for row in csv.reader(lines):
                    if len(row) == 3 and row[1].startswith("sha256="):
                        found.setdefault(row[0], set()).add(row[1].removeprefix("sha256="))
    except (OSError, ValueError, csv.Error):
        return {}
    return found if any(name.startswith("sglang/srt/") for name in found) else {}


def _as_in_git(root: Path, file: str, content: bytes) -> bool | None:
    """Whether `content` is what the checkout around `root` has committed; None: there is none."""
    committed = _git(root, "cat-file", "--filters", f"HEAD:./{file}")
    return None if committed is None else committed == content


def _git(root: Path, *words: str) -> bytes | None:
    """What git says in `root`; None: it fails."""
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            timeout=_GIT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None
