"""Memory against the published checkpoints' own sizes and SGLang's own formula."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dsv4doctor.facts.checkpoint import read_checkpoint
from dsv4doctor.memory import Parallel, TorchIndexer, kv_bytes_per_token, tensor_bytes, weights
from dsv4doctor.models import Location, TensorInfo

FLASH = "deepseek-ai__DeepSeek-V4-Flash"
V41 = "deepseek-ai__DeepSeek-V4.1-Flash"
PUBLISHED = {
    FLASH: 159_609_485_896,
    "nvidia__DeepSeek-V4-Flash-NVFP4": 168_266_793_544,
    V41: 510_286_023_000,
}
SPECS = Path(__file__).parent / "checkpoints"


@pytest.mark.parametrize("name", PUBLISHED)
def test_one_rank_holds_the_payload_to_the_byte(name: str, checkpoint: Callable[..., Path]) -> None:
    stored = read_checkpoint(checkpoint(name))
    assert weights(stored, Parallel(), draft=True).total == PUBLISHED[name]
    assert stored.payload_bytes == PUBLISHED[name]


def test_room_is_for_the_experts_of_the_configuration(checkpoint: Callable[..., Path]) -> None:
    """A checkpoint cut down, or not yet whole: SGLang still makes all of them."""
    whole = weights(read_checkpoint(checkpoint(FLASH)), Parallel(), draft=False)
    part = weights(read_checkpoint(checkpoint(FLASH, experts=1)), Parallel(), draft=False)
    assert part.experts == whole.experts


def test_ranks_share_what_sglang_divides(checkpoint: Callable[..., Path]) -> None:
    stored = read_checkpoint(checkpoint(FLASH))
    one = weights(stored, Parallel(), draft=True)
    eight = weights(stored, Parallel(8, 8), draft=True)
    assert eight.experts == one.experts // 8
    assert eight.whole == one.whole
    assert one.divided / 8 <= eight.divided < one.divided / 8 + 1000
    assert weights(stored, Parallel(8, 8), draft=False).draft == 0
    with_dp = weights(stored, Parallel(8, 1), draft=False)
    assert with_dp.divided > eight.divided
    assert with_dp.experts == eight.experts
    shared = weights(stored, Parallel(8, 8, shared_experts_whole=True), draft=False)
    per_layer = 3 * (2048 * 4096 + 16 * 32)
    assert shared.divided - eight.divided == pytest.approx(43 * per_layer * 7 / 8, abs=1000)


def test_wo_a_in_bf16_is_twice_its_size(checkpoint: Callable[..., Path]) -> None:
    stored = read_checkpoint(checkpoint(FLASH))
    plain = weights(stored, Parallel(), draft=False)
    wider = weights(stored, Parallel(), draft=False, wo_a_in_bf16=True)
    assert wider.total - plain.total == 43 * 8192 * 4096


def test_engram_tables_of_v41(checkpoint: Callable[..., Path]) -> None:
    """189 GiB over the group, as users report."""
    stored = read_checkpoint(checkpoint(V41))
    over_ranks = weights(stored, Parallel(8, 8), draft=True).engram
    assert over_ranks * 8 / 2**30 == pytest.approx(189, abs=0.5)
    assert weights(stored, Parallel(8, 8, engram_over_ranks=False), draft=True).engram == (
        over_ranks * 8
    )


def test_cache_of_a_token() -> None:
    """Against the sum of SGLang 0.5.14's pool configurator, worked out by hand."""
    config = json.loads((SPECS / f"{FLASH}.json").read_text(encoding="utf-8"))["config"]
    by_hand = (
        0.1 * 584 * 43  # window
        + 584 / 4 * 21  # compressed by 4
        + 584 / 128 * 20  # compressed by 128
        + 132 / 4 * 21  # indexer
        + 0.1 * (8 / 128) * (2 * 2 * 512 * 4) * 21  # states of 4
        + 0.1 * (128 / 128) * (2 * 512 * 4) * 20  # states of 128
        + 0.1 * (8 / 128) * (2 * 2 * 128 * 4) * 21  # the indexer's states
    )
    found = kv_bytes_per_token(config, speculative=False, window_ratio=0.1, state_bytes=4)
    assert found == pytest.approx(by_hand)
    by_request = kv_bytes_per_token(
        config, speculative=False, window_ratio=0.1, state_bytes=4, state_page=256
    )
    assert by_request is not None
    assert by_request < by_hand - 0.1 * 2 * 512 * 4 * 20
    with_draft = kv_bytes_per_token(config, speculative=True, window_ratio=0.1, state_bytes=4)
    assert with_draft is not None
    assert with_draft > by_hand * 44 / 43


@pytest.mark.parametrize(
    "broken",
    [
        {"compress_ratios": [2] * 43},
        {"compress_ratios": "all"},
        {"compress_ratios": [[4]] * 43},
        {"head_dim": None},
        {"sliding_window": 0},
        {"num_hidden_layers": 99},
    ],
)
def test_another_layout_is_not_guessed(broken: dict[str, object]) -> None:
    config = json.loads((SPECS / f"{FLASH}.json").read_text(encoding="utf-8"))["config"]
    changed = {**config, **broken}
    assert kv_bytes_per_token(changed, speculative=False, window_ratio=0.1, state_bytes=4) is None


def test_sizes_of_tensors() -> None:
    tensor = TensorInfo("x", "F4", (8, 16), "model.safetensors")
    assert tensor_bytes(tensor) == 64
    assert tensor_bytes(replace(tensor, dtype="BF16")) == 256
    assert tensor_bytes(replace(tensor, dtype="")) == 0
    assert tensor_bytes(replace(tensor, shape=(), dtype="F32")) == 4


def test_the_torch_indexer_holds_a_row_for_every_new_token() -> None:
    """SGLang 0.5.14's was measured at 2.32 MiB a row at 8,192 tokens, 9.13 at 32,768."""
    indexer = TorchIndexer(64, 128, 4, None, Location("indexer.py", 1))
    for length, measured in ((8192, 2.32), (32768, 9.13)):
        assert indexer.row_bytes(length) / 2**20 == pytest.approx(measured, rel=0.04)
    assert indexer.bytes(8192, 8192) == 8192 * indexer.row_bytes(8192)
    chunked = replace(indexer, rows_at_once=1024)
    assert chunked.bytes(1000, 8192) == indexer.bytes(1000, 8192)
    # The logits of every row stay.
    assert chunked.bytes(8192, 8192) == indexer.bytes(1024, 8192) + 8192 * 2048 * 4
