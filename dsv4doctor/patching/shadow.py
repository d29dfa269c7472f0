"""A tree that is another tree with some files replaced, made of links."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from dsv4doctor.models import SglangTree


def build(tree: SglangTree, contents: Mapping[str, bytes], target: Path) -> SglangTree:
    """`tree` as if its files were `contents` (file -> bytes), in the new folder `target`.

    Only the folders on the way to a replaced file are real; everything else is a link.
    """
    real = {str(parent) for file in contents for parent in Path(file).parents} | {"."}
    for folder in sorted(real):
        os.makedirs(target / folder, exist_ok=True)
        source = Path(tree.root) / folder
        for name in os.listdir(source):
            inner = os.path.normpath(os.path.join(folder, name))
            if inner not in real and inner not in contents and name != "__pycache__":
                os.symlink(source / name, target / inner)
    for file, content in contents.items():
        (target / file).write_bytes(content)
    return SglangTree(str(target), tree.version, tree.origin)
