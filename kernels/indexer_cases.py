"""Self-checks and benchmark rows of the indexer logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from dsv4doctor.kernels import upstream
from dsv4doctor.kernels.indexer_logits import LogitsBuffer, indexer_logits
from dsv4doctor.kernels.mla_cases import relative_error
from dsv4doctor.kernels.reference import indexer_logits as reference
from dsv4doctor.kernels.registry import BenchCase, Check

_MILLION = 1 << 20


def _error(heads: int, width: int, lengths: list[int], pool: int = 4096) -> Callable[[str], float]:
    def run(device: str) -> float:
        rows = len(lengths)
        seed = torch.seed() % 2**31
        inputs = reference.random_inputs(rows, heads, width, lengths, pool, device, seed)
        return relative_error(indexer_logits(*inputs), reference.indexer_logits(*inputs))

    return run


def _buffer_error(device: str) -> float:
    """The worst of four calls with other lengths into one kept buffer."""
    buffer = LogitsBuffer.empty(8, 512, device)
    worst = 0.0
    for lengths in ([512, 3, 64], [0, 400, 1], [65, 64, 63], [511, 0, 512]):
        inputs = reference.random_inputs(3, 64, 512, lengths, 32, device)
        out = indexer_logits(*inputs, out=buffer)
        worst = max(worst, relative_error(out, reference.indexer_logits(*inputs)))
    return worst


def _replay_error(device: str) -> float:
    """Captured once with a kept and with a fresh tensor, then replayed with other lengths."""
    inputs = reference.random_inputs(3, 64, 4096, [4096, 0, 77], 64, device)
    inputs[4].clamp_(max=63)
    buffer = LogitsBuffer.empty(3, 4096, device)
    indexer_logits(*inputs, out=buffer)
    indexer_logits(*inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = indexer_logits(*inputs, out=buffer)
        fresh = indexer_logits(*inputs)
    worst = 0.0
    for lengths in ([5, 4096, 64], [1000, 1, 0]):
        inputs[3].copy_(torch.tensor(lengths))
        graph.replay()
        want = reference.indexer_logits(*inputs)
        worst = max(worst, relative_error(kept, want), relative_error(fresh, want))
    return worst


def checks(bar: float) -> Sequence[Check]:
    """Small shapes where the interpreter runs, up to a million tokens on a GPU."""
    result = [
        Check("5 rows, 64 heads, lengths 0 to 200", bar, _error(64, 320, [0, 1, 64, 200, 70], 16)),
        Check("1 row, 32 heads, 300 tokens", bar, _error(32, 320, [300], 16)),
        Check("kept buffer", bar, _buffer_error),
    ]
    if torch.cuda.is_available():
        lengths = list(range(0, 8190, 117))
        result += [
            Check("graph replayed with other lengths", bar, _replay_error),
            Check("70 rows up to 8190 tokens", bar, _error(64, 8192, lengths)),
            Check(
                "a million tokens", bar, _error(64, _MILLION, [_MILLION - 3, 1000], 32768), False
            ),
        ]
    return result


def _upstream(inputs: tuple) -> dict[str, Callable[[], object]]:
    """SGLang's torch path; its page table has to name real pages past the lengths too."""
    q, cache, weights, lengths, table, width = inputs
    found = upstream.functions(
        "srt.layers.attention.dsv4.indexer",
        "fp8_paged_mqa_logits_torch_sm120",
        given={"FP8_DTYPE": torch.float8_e4m3fn},
    )
    if found is None:
        return {}
    table = table.clamp(max=cache.shape[0] - 1)
    call = found["fp8_paged_mqa_logits_torch_sm120"]
    return {
        "upstream torch": lambda: call(
            q.unsqueeze(1), cache, weights, lengths, table, None, width, False
        )
    }


def bench_cases(device: str) -> Iterator[BenchCase]:
    """`kept`: into a LogitsBuffer; `fresh`: a new tensor with its whole tail, as upstream's.

    Limits and lengths count entries of the compressed key cache, one for four tokens of context.
    """
    shapes = ((1, 8192, 512), (64, 8192, 512), (64, 32768, 512), (64, 262144, 512))
    shapes += ((64, _MILLION, 512), (64, 32768, 32768), (64, 131072, 131072))
    for rows, width, length in shapes:
        pool = min(rows * width // 64, 140_000)
        inputs = reference.random_inputs(rows, 64, width, [length] * rows, pool, device)
        peers = _upstream(inputs)
        buffer = LogitsBuffer.empty(rows, width, device)
        moved = rows * length * (132 + 4)
        flops = rows * length * 64 * 128 * 2
        name = f"B={rows} limit {width} there {length}"
        yield BenchCase(f"{name}, kept", _kept(inputs, buffer), peers, moved, flops)
        if length == 512:
            moved += rows * (width - length) * 4
            yield BenchCase(f"{name}, fresh", _fresh(inputs), {}, moved, flops)


def _kept(inputs: tuple, buffer: LogitsBuffer) -> Callable[[], object]:
    return lambda: indexer_logits(*inputs, out=buffer)


def _fresh(inputs: tuple) -> Callable[[], object]:
    return lambda: indexer_logits(*inputs)
