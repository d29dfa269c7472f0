"""dsv4doctor as a patched SGLang imports it.

What is installed beside the SGLang that serves is the truth.  A borrowed environment gets the
dsv4doctor that started the trace, by a finder that finds nothing else.
"""

import importlib.abc
import importlib.util
import os
import sys

NAME = "dsv4doctor"


class Finder(importlib.abc.MetaPathFinder):
    def __init__(self, folder):
        self.folder = folder

    def find_spec(self, name, path=None, target=None):
        if name != NAME:
            return None
        return importlib.util.spec_from_file_location(
            name,
            os.path.join(self.folder, "__init__.py"),
            submodule_search_locations=[self.folder],
        )


def lend(folder):
    """Find dsv4doctor in `folder` where the interpreter has none; None: lend nothing."""
    if folder:
        sys.meta_path.append(Finder(folder))
