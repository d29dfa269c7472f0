"""What a process of `--level full` does, in the serving environment's interpreter: one rank of an
all-reduce, or copies.  Standard library and torch only; each result is a JSON line.

usage: measure_worker.py all-reduce BACKEND MEGABYTES RANK STORE
       measure_worker.py copies DEVICES MEGABYTES
Exit code 3: torch, or what it needs of CUDA, is not there.  1: the test failed, and the last line
says how.
"""

import json
import os
import sys
import time
from datetime import timedelta
from typing import Any

_ROUNDS = 10
_TIMEOUT = timedelta(seconds=600)  # the parent's deadline is earlier
_UNAVAILABLE = 3


def _say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def _torch(on_gpu: bool) -> Any:
    try:
        import torch
    except Exception as error:
        _say(unavailable=f"torch cannot be imported ({type(error).__name__}: {error})")
        sys.exit(_UNAVAILABLE)
    if on_gpu and not torch.cuda.is_available():
        _say(unavailable="torch sees no GPU")
        sys.exit(_UNAVAILABLE)
    return torch


def _all_reduce(backend: str, megabytes: int, rank: int, store: str) -> None:
    torch = _torch(on_gpu=backend == "nccl")
    from torch import distributed

    device = torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(rank)
        device = torch.device("cuda", rank)
    distributed.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=2, timeout=_TIMEOUT
    )
    data = torch.full((megabytes << 18,), float(rank + 1), device=device)
    distributed.all_reduce(data)
    if not bool((data == 3.0).all()):
        raise ValueError("the sum over both ranks is wrong")
    data.zero_()  # stays finite, however often it is added up
    _wait(torch, device)
    started = time.perf_counter()
    for _ in range(_ROUNDS):
        distributed.all_reduce(data)
    _wait(torch, device)
    seconds = (time.perf_counter() - started) / _ROUNDS
    # For two ranks the bytes on the wire, each way, are those of the data.
    _say(name="all-reduce", rate=(megabytes << 20) / seconds / 1e9)
    sys.stdout.flush()
    os._exit(0)  # a communicator that hangs while it is taken down has been measured all the same


def _copies(devices: list[str], megabytes: int) -> None:
    torch = _torch(on_gpu=devices[0] != "cpu")
    pinned = devices[0] != "cpu"
    host = torch.zeros(megabytes << 20, dtype=torch.uint8, pin_memory=pinned)
    boards = [torch.zeros(megabytes << 20, dtype=torch.uint8, device=name) for name in devices]
    ways = [("copy to GPU", boards[0], host), ("copy from GPU", host, boards[0])]
    if len(boards) > 1:
        ways.append(("copy between GPUs", boards[1], boards[0]))
    for name, target, source in ways:
        _say(begun=name)
        host.fill_(7)
        boards[0].fill_(7)
        target.copy_(source)
        _wait(torch, boards[0].device)
        if not bool((target == 7).all()):
            raise ValueError(f"{name}: what arrives is not what was sent")
        started = time.perf_counter()
        for _ in range(_ROUNDS):
            target.copy_(source, non_blocking=True)
        for board in boards:
            _wait(torch, board.device)
        seconds = (time.perf_counter() - started) / _ROUNDS
        _say(name=name, rate=(megabytes << 20) / seconds / 1e9)


def _wait(torch: Any, device: Any) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _main(arguments: list[str]) -> None:
    if arguments[0] == "all-reduce":
        _all_reduce(arguments[1], int(arguments[2]), int(arguments[3]), arguments[4])
    else:
        _copies(arguments[1].split(","), int(arguments[2]))


if __name__ == "__main__":
    del sys.path[0]  # this folder's modules are not for torch to find
    try:
        _main(sys.argv[1:])
    except Exception as error:
        _say(failed=f"{type(error).__name__}: {error}")
        # torch's own clean-up can hang, or say something else as the last thing
        os._exit(1)
