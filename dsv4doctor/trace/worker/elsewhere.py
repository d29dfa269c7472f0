"""What SGLang asks of its own machine, for a launch on another one than this.

This machine's InfiniBand devices and TLS files say nothing about that one's: it is taken to have
those that the launch names.
"""

import contextlib
import itertools
import os
import re

_DEVICES = "/sys/class/infiniband"
_MOST_BYTES = 1 << 20


class Machine:
    """While entered, there is every InfiniBand device and TLS file that `arguments` name."""

    def __init__(self, arguments):
        self.arguments = arguments
        self.asked = {}

    def __enter__(self):
        self.saved = is_dir, is_file, list_dir = os.path.isdir, os.path.isfile, os.listdir
        tls, devices = _tls_files(self.arguments), _names(self.arguments)

        def is_there(path):
            return path == _DEVICES or is_dir(path)

        def is_file_there(path):
            if path in tls and not is_file(path):
                self.asked[path] = None
                return True
            return is_file(path)

        def listing(path="."):
            if path != _DEVICES:
                return list_dir(path)
            self.asked[_DEVICES] = None
            return devices

        os.path.isdir, os.path.isfile, os.listdir = is_there, is_file_there, listing
        return self

    def __exit__(self, *exc):
        os.path.isdir, os.path.isfile, os.listdir = self.saved

    def leniencies(self):
        said = "of the serving machine: it is taken to have what the launch names"
        return [f"{path} {said}" for path in self.asked]


def _tls_files(arguments):
    """What follows --ssl-keyfile and its like."""
    pairs = itertools.pairwise([*arguments, ""])
    return {
        flag.partition("=")[2] or following
        for flag, following in pairs
        if flag.startswith("--ssl-")
    }


def _names(arguments):
    """Whatever can be a device's name in the arguments, and in the files that they name."""
    texts = list(arguments)
    for argument in arguments:
        path = argument.partition("=")[2] if argument.startswith("--") else argument
        if os.path.isfile(path):
            with (
                contextlib.suppress(OSError),  # SGLang says what is wrong with it
                open(path, encoding="utf-8", errors="replace") as file,
            ):
                texts.append(file.read(_MOST_BYTES))
    return sorted({name for text in texts for name in re.findall(r"[\w.-]+", text)})
