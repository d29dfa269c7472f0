"""A simulated GPU: what torch, Triton and NVML-less code are told about the device."""

import importlib.util
import types

from . import no_triton

# Public data sheet figures; only their order of magnitude can matter to dispatch.
_BOARDS = {
    (9, 0): ("NVIDIA H200", 141, 132),
    (10, 0): ("NVIDIA B200", 180, 148),
    (10, 3): ("NVIDIA B300", 270, 148),
    (12, 0): ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 96, 188),
    (12, 1): ("NVIDIA GB10", 119, 48),
}
GIB = 1 << 30


class Board:
    """Device properties as torch.cuda.get_device_properties gives them."""

    def __init__(self, capability, name=None, memory_bytes=None):
        default_name, default_gib, processors = _BOARDS[capability]
        self.name = name or default_name
        self.major, self.minor = capability
        self.total_memory = memory_bytes or default_gib * GIB
        self.multi_processor_count = processors
        self.warp_size = 32
        self.L2_cache_size = 128 << 20
        self.regs_per_multiprocessor = 65536
        self.is_integrated = capability == (12, 1)
        self.gcnArchName = ""
        self.uuid = "0"
        large = self.major < 12
        self.shared_memory_per_block = 49152
        self.shared_memory_per_block_optin = 232448 if large else 101376
        self.shared_memory_per_multiprocessor = 233472 if large else 102400
        self.max_threads_per_multi_processor = 2048 if large else 1536


class _Handle:
    """A stream or an event that does nothing."""

    cuda_stream = 0

    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: 0

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return False


def simulate(board, count):
    """Make torch.cuda report `count` times `board`; no driver is ever asked."""
    import torch

    capability = (board.major, board.minor)
    answers = {
        "is_available": lambda: True,
        "is_initialized": lambda: False,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "device_count": lambda: count,
        "current_device": lambda: 0,
        "set_device": lambda *args: None,
        "get_device_capability": lambda *args, **kwargs: capability,
        "get_device_name": lambda *args, **kwargs: board.name,
        "get_device_properties": lambda *args, **kwargs: board,
        "get_arch_list": lambda: [f"sm_{board.major}{board.minor}"],
        "mem_get_info": lambda *args: (board.total_memory - GIB, board.total_memory),
        "memory_allocated": lambda *args: 0,
        "memory_reserved": lambda *args: 0,
        "max_memory_allocated": lambda *args: 0,
        "reset_peak_memory_stats": lambda *args: None,
        "synchronize": lambda *args: None,
        "empty_cache": lambda *args: None,
        "is_current_stream_capturing": lambda: False,
        "current_stream": lambda *args: _Handle(),
        "default_stream": lambda *args: _Handle(),
        "stream": lambda stream: _Handle(),
        "Stream": _Handle,
        "Event": _Handle,
        "nvtx": types.SimpleNamespace(range_push=lambda *args: None, range_pop=lambda: None),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.version.cuda = torch.version.cuda or "13.0"
    if not hasattr(torch._C, "_cuda_getCurrentRawStream"):
        torch._C._cuda_getCurrentRawStream = lambda *args: 0


class _TritonDriver:
    """What Triton's runtime asks of its driver before a launch."""

    target = None  # where there is no Triton to make one of

    def __init__(self, board):
        self.board = board

    def is_active(self):
        return True

    def get_current_target(self):
        if self.target is not None:
            return self.target
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.board.major * 10 + self.board.minor, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=0):
        return 0

    def get_device_capability(self, device=0):
        return (self.board.major, self.board.minor)

    def get_device_interface(self):
        import torch

        return torch.cuda

    def get_active_torch_device(self):
        import torch

        return torch.device("cuda", 0)

    def get_benchmarker(self):
        return lambda kernel, **kwargs: [0.0, 0.0, 0.0]


def simulate_triton(board, launched):
    """Give Triton the simulated GPU; `launched(symbol, args)` takes the place of a launch."""
    if importlib.util.find_spec("triton") is None:
        no_triton.simulate(_TritonDriver(board))
        return
    from triton.runtime import driver
    from triton.runtime.autotuner import Autotuner, Heuristics
    from triton.runtime.jit import JITFunction

    driver.set_active(_TritonDriver(board))

    def run(self, *args, **kwargs):
        function = self
        while not hasattr(function, "__name__") and hasattr(function, "fn"):
            function = function.fn
        function = getattr(function, "fn", function)
        launched(f"triton:{function.__module__}.{function.__name__}", args)

    for runner in (JITFunction, Autotuner, Heuristics):
        runner.run = run
