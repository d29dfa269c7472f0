"""What the worker may not do: use the network, start programs, write outside its folder.

An audit hook sees every such call of the interpreter, whoever makes it.  It cannot be removed
again, and a fork inherits it.
"""

import os
import sys

_NETWORK = {
    *("socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg"),
    *("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"),
}
_PROGRAMS = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "pty.spawn"}
_CHANGES = {
    **dict.fromkeys(("os.remove", "os.rmdir", "os.mkdir", "os.chmod", "os.chown"), (0,)),
    **dict.fromkeys(("os.truncate", "shutil.rmtree"), (0,)),
    **dict.fromkeys(("os.rename", "os.link", "shutil.move"), (0, 1)),
    "os.symlink": (1,),
}
"""Event -> which of its arguments are paths that change."""
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Refused(PermissionError):
    """The traced code tried something that a trace never needs."""


class NoProgram(FileNotFoundError):
    """To the traced code no program is installed: it asks torch for what nvidia-smi would say."""


def confine(scratch, caches=()):
    """From here on only `scratch`, `caches` (folders) and /dev/null may be written."""
    allowed = tuple(os.path.realpath(folder) + os.sep for folder in (scratch, *caches))
    allowed += ("/dev/null/", "/dev/zero/")

    def inside(path):
        if isinstance(path, int):
            return True
        return (os.path.realpath(os.fsdecode(path)) + os.sep).startswith(allowed)

    def hook(event, args):
        if event == "open":
            path, _, flags = args
            if flags and flags & _WRITE_FLAGS and path is not None and not inside(path):
                raise Refused(f"writing {path!r} is not allowed in a trace")
        elif event in _NETWORK:
            raise Refused(f"network access ({event}) is not allowed in a trace")
        elif event in _PROGRAMS:
            raise NoProgram(f"{args[0]!r}: programs are not started in a trace")
        elif event in _CHANGES:
            for place in _CHANGES[event]:
                if not inside(args[place]):
                    raise Refused(f"{event} on {args[place]!r} is not allowed in a trace")

    sys.addaudithook(hook)


def die_with_parent():
    """Have the kernel end this process when the one that started it ends, however it ends."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes
    import signal

    set_death_signal = 1
    ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL, 0, 0, 0)


def limit_memory(limit_bytes):
    """A hard ceiling on anonymous memory, where the system has one."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
    except (ImportError, ValueError, OSError):
        return
