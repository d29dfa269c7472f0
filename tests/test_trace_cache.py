"""The trace cache: the same is read back, anything changed is traced again."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tracing import BOTH_TRITON, EAGLE, changed_tree, request

from dsv4doctor.models import Arch, SglangTree
from dsv4doctor.trace import cache
from dsv4doctor.trace.session import trace_launch

pytestmark = pytest.mark.wheels

Tree = Callable[[str], SglangTree]
Checkpoint = Callable[..., Path]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSV4DOCTOR_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def tree(sglang_tree: Tree) -> SglangTree:
    return sglang_tree("0.5.14")


@pytest.fixture
def model(
    checkpoint: Checkpoint, copy_checkpoint: Callable[[Path, Path], Path], tmp_path: Path
) -> Path:
    small = checkpoint("nvidia__DeepSeek-V4-Flash-NVFP4", experts=1)
    return copy_checkpoint(small, tmp_path / "model")


def test_the_same_launch_is_read_back(tree: SglangTree, model: Path) -> None:
    first = trace_launch(request(tree, model))
    second = trace_launch(request(tree, model))
    assert (first.cached, second.cached) == (False, True)
    assert replace(second, cached=False) == first


def test_a_damaged_entry_is_traced_again(tree: SglangTree, model: Path, tmp_path: Path) -> None:
    trace_launch(request(tree, model))
    [entry] = (tmp_path / "cache" / "traces").iterdir()
    entry.write_text(entry.read_text()[:-40])
    assert not trace_launch(request(tree, model)).cached


def test_without_the_cache_nothing_is_kept(tree: SglangTree, model: Path, tmp_path: Path) -> None:
    trace_launch(request(tree, model), use_cache=False)
    assert not (tmp_path / "cache" / "traces").exists()


def test_every_input_is_in_the_key(tree: SglangTree, model: Path) -> None:
    asked = request(tree, model)
    variants = [
        request(tree, model, EAGLE + BOTH_TRITON),
        request(tree, model, arch=Arch(12, 1)),
        request(tree, model, environment={"SGLANG_DSV4_FP4_EXPERTS": "0"}),
        request(tree, model, with_path=True),
        replace(asked, interpreter=Path("/usr/bin/python3")),
        replace(asked, environment={"SGLANG_X": "1"}),
    ]
    keys = {cache.key(one) for one in [asked, *variants]}
    assert len(keys) == 1 + len(variants)
    assert cache.key(replace(asked, environment={"UNRELATED": "1"})) == cache.key(asked)


def test_any_changed_byte_of_the_tree_misses(tree: SglangTree, model: Path, tmp_path: Path) -> None:
    copy = changed_tree(tree, tmp_path / "tree", "srt/server_args.py", "# one")
    before = cache.key(request(copy, model))
    path = Path(copy.root) / "sglang" / "srt" / "server_args.py"
    text = path.read_text()
    path.write_text(text[:-3] + "two"[:3])
    assert path.stat().st_size == len(text.encode())
    after = cache.key(request(copy, model))
    path.write_text(text)
    assert after != before
    assert cache.key(request(copy, model)) == before  # by content, not by time


@pytest.mark.parametrize("file", ["config.json", "hf_quant_config.json"])
def test_any_changed_byte_of_the_checkpoint_misses(
    file: str, tree: SglangTree, model: Path
) -> None:
    before = cache.key(request(tree, model))
    (model / file).write_text((model / file).read_text() + " ")
    assert cache.key(request(tree, model)) != before


def test_a_changed_header_misses(tree: SglangTree, model: Path) -> None:
    before = cache.key(request(tree, model))
    shard = sorted(model.glob("*.safetensors"))[3]
    with shard.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length)
        assert b'"F32"' in header
        file.seek(8)
        file.write(header.replace(b'"F32"', b'"I32"', 1))
    assert cache.key(request(tree, model)) != before
