"""What SGLang asks of its own machine, for a launch on another one than this.

This machine's InfiniBand devices say nothing about that one's: there, it has those that the launch
names.
"""

import os
import re

_DEVICES = "/sys/class/infiniband"
_MOST_BYTES = 1 << 20


class Devices:
    """While entered, the machine has every InfiniBand device that `arguments` name."""

    def __init__(self, arguments):
        self.arguments = arguments
        self.asked = False

    def __enter__(self):
        self.saved = is_dir, list_dir = os.path.isdir, os.listdir

        def is_there(path):
            return path == _DEVICES or is_dir(path)

        def listing(path="."):
            if path != _DEVICES:
                return list_dir(path)
            self.asked = True
            return _names(self.arguments)

        os.path.isdir, os.listdir = is_there, listing
        return self

    def __exit__(self, *exc):
        os.path.isdir, os.listdir = self.saved

    def leniencies(self):
        if not self.asked:
            return []
        return [f"{_DEVICES} of the serving machine: it is taken to have what the launch names"]


def _names(arguments):
    """Whatever can be a device's name in the arguments, and in the files that they name."""
    texts = list(arguments)
    for argument in arguments:
        path = argument.partition("=")[2] if argument.startswith("--") else argument
        if os.path.isfile(path):
            with open(path, encoding="utf-8", errors="replace") as file:
                texts.append(file.read(_MOST_BYTES))
    return sorted({name for text in texts for name in re.findall(r"[\w.-]+", text)})
