"""The trace cache: the same is read back, anything changed is traced again."""

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tracing import BOTH_TRITON, EAGLE, changed_tree, request

from dsv4doctor.asked import Options
from dsv4doctor.audit import Settings, request_of
from dsv4doctor.errors import UndeterminedError, UsageError
from dsv4doctor.models import Arch, SglangTree, Trace
from dsv4doctor.target import resolve
from dsv4doctor.trace import cache, process, session
from dsv4doctor.trace.session import trace_launch, trace_launches

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


def test_text_of_other_bytes_than_utf8_is_kept(tree: SglangTree, tmp_path: Path) -> None:
    """A model's folder may have such a name."""
    odd = Trace(
        tree, Arch(12, 0), {"model_path": "/\udcff"}, (), {}, (), (), (), (), {}, cached=True
    )
    cache.store("key", odd)
    assert cache.load("key", tree) == odd
    assert [path.name for path in (tmp_path / "cache" / "traces").iterdir()] == ["key.json"]


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
    elsewhere = replace(asked.launch, source="serve.sh", line=3)
    assert cache.key(replace(asked, launch=elsewhere)) == cache.key(asked)


def test_a_tree_is_hashed_once_for_all_launches(
    tree: SglangTree, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A matrix asks for dozens on one tree, and looking at its files takes longer than the rest."""
    looked: list[Path] = []
    monkeypatch.setattr(cache, "content_hash", lambda folder: looked.append(folder) or "same")
    monkeypatch.setattr(
        session, "_run_group", lambda asked, *_: [UndeterminedError("no")] * len(asked)
    )
    trace_launches([request(tree, model, flags) for flags in (EAGLE, (), BOTH_TRITON)])
    assert len(looked) == len(set(looked))


def test_the_packages_of_a_systems_python(tmp_path: Path) -> None:
    """As in SGLang's own container: /usr/bin/python3, and what pip installs below /usr/local."""
    for place in ("lib/python3/dist-packages/six-1", "local/lib/python3.12/dist-packages/torch-2"):
        (tmp_path / f"{place}.dist-info").mkdir(parents=True)
    found = cache.packages(tmp_path / "bin" / "python3")
    assert found == ["six-1.dist-info", "torch-2.dist-info"]


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


@pytest.mark.parametrize(
    "file", ["config.json", "hf_quant_config.json", "model.safetensors.index.json"]
)
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


def test_a_command_misses_what_changed_and_finds_again_what_was_put_back(
    tree: SglangTree, model: Path, tmp_path: Path
) -> None:
    """As the command line resolves a launch, with everything that it keeps between runs."""
    sglang = changed_tree(tree, tmp_path / "tree", "srt/server_args.py", "# one")

    def key(*flags: str, env: tuple[str, ...] = ()) -> str:
        said = ("--tp", "4", *EAGLE, *flags)
        options = Options(str(model), said, sglang=sglang.root, arch="sm_120", env=env)
        return cache.key(request_of(resolve(options), Settings()))

    before = key()
    keys = {key("--disable-radix-cache"), key(env=("SGLANG_X=1",))}
    shard = sorted(model.glob("*.safetensors"))[3]
    for file, old, new in (
        (model / "config.json", b'"vocab_size"', b'"vocab_sizes"'),
        (model / "hf_quant_config.json", b"NVFP4", b"NVFP5"),
        (model / "model.safetensors.index.json", b'"total_size": 1', b'"total_size": 2'),
        (shard, b'"F32"', b'"I32"'),
        (Path(sglang.root) / "sglang" / "srt" / "server_args.py", b"# one", b"# two"),
    ):
        was = file.stat()
        _replace(file, old, new)
        os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns))
        keys.add(key())
        _replace(file, new, old)
        assert key() == before
    assert len(keys - {before}) == 7
    shard.rename(shard.with_suffix(".gone"))
    with pytest.raises(UsageError, match="which is not there"):
        key()


def _replace(file: Path, old: bytes, new: bytes) -> None:
    """Once, near the start of `file`, which may be mostly holes."""
    with file.open("r+b") as opened:
        start = opened.read(4 << 20)
        assert old in start
        opened.seek(0)
        opened.write(start.replace(old, new, 1))
        if len(old) != len(new):
            opened.truncate()


@pytest.mark.parametrize("package", ["facts", "kernels", "models", "trace"])
def test_our_own_code_is_in_the_key(
    package: str, tree: SglangTree, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request(tree, model)
    before, real = cache.key(asked), cache.content_hash
    ours = Path(cache.__file__).parent.parent / package
    assert any(ours.glob("*.py"))
    monkeypatch.setattr(
        cache, "content_hash", lambda root: "other" if root.samefile(ours) else real(root)
    )
    assert cache.key(asked) != before


def _keys_of_a_changed_draft(draft: Path, flags: list[str], hub: Path) -> tuple[object, object]:
    variables = {"HF_HUB_CACHE": str(hub)}
    before = cache.named_files(flags, variables)
    config = draft / "config.json"
    config.write_text(config.read_text() + " ")
    return before, cache.named_files(flags, variables)


@pytest.mark.parametrize(
    ("folder", "line"),
    [
        ("a draft", "speculative-draft-model-path: {}"),
        ("a draft", "speculative-draft-model-path:   '{}'   # the draft"),
        ("a draft", '{{"speculative-draft-model-path": "{}"}}'),
        ("a draft", "speculative-draft-model-path:\n  '{}'"),
        ("draft", "speculative-draft-model-path: {} # the draft"),
        ("draft", "{{speculative-draft-model-path: {}, tp: 4}}"),
        ("draft", "speculative-draft-model-path: &draft {}"),
        ("draft", "speculative-draft-model-path: >-\n  {}"),
    ],
)
def test_a_draft_that_only_a_config_file_names(tmp_path: Path, folder: str, line: str) -> None:
    draft, config = tmp_path / folder, tmp_path / "serve.yaml"
    draft.mkdir()
    (draft / "config.json").write_text("{}")
    config.write_text("tp: 4\n" + line.format(draft) + "\nport: 30000\n")
    before, after = _keys_of_a_changed_draft(draft, ["--config", str(config)], tmp_path)
    assert before != after


@pytest.mark.parametrize("how", ["a flag", "a flag with =", "a config file"])
def test_a_draft_of_the_hub_cache(tmp_path: Path, how: str) -> None:
    draft = tmp_path / "models--org--draft" / "snapshots" / "abc"
    draft.mkdir(parents=True)
    (draft / "config.json").write_text("{}")
    (draft.parent.parent / "refs").mkdir()
    (draft.parent.parent / "refs" / "main").write_text("abc")
    config = tmp_path / "serve.yaml"
    config.write_text("speculative-draft-model-path: org/draft\n")
    flags = {
        "a flag": ["--speculative-draft-model-path", "org/draft"],
        "a flag with =": ["--speculative-draft-model-path=org/draft"],
        "a config file": ["--config", str(config)],
    }[how]
    before, after = _keys_of_a_changed_draft(draft, flags, tmp_path)
    assert before != after
    (draft.parent.parent / "refs" / "main").write_text("abd")
    assert cache.named_files(flags, {"HF_HUB_CACHE": str(tmp_path)}) != after


def test_a_draft_folder_with_a_pipe_in_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    os.mkfifo(tmp_path / "other.json")
    os.mkfifo(tmp_path / "a.safetensors")
    assert list(cache.named_files([str(tmp_path)], {})) == [str(tmp_path)]


def test_the_config_file_is_in_the_key(tree: SglangTree, model: Path, tmp_path: Path) -> None:
    draft, config = tmp_path / "draft", tmp_path / "serve.yaml"
    draft.mkdir()
    (draft / "config.json").write_text("{}")
    config.write_text(f"speculative-draft-model-path: {draft}\n")
    asked = request(tree, model, ("--config", str(config)))
    before = cache.key(asked)
    (draft / "config.json").write_text("{ }")
    assert cache.key(asked) != before


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"HOME": "/h"}, "/h/.cache/huggingface/hub"),
        ({"HOME": "/h", "HF_HOME": "~/hf"}, "/h/hf/hub"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/huggingface/hub"),
        ({"HF_HUB_CACHE": "/y", "HF_HOME": "/hf"}, "/y"),
    ],
)
def test_the_trace_looks_into_the_users_own_hub_cache(
    tree: SglangTree, model: Path, variables: dict[str, str], folder: str
) -> None:
    """The worker's own HOME is a scratch folder."""
    asked = replace(request(tree, model), environment=variables)
    assert process._environment(asked, "/scratch")["HF_HUB_CACHE"] == folder


def test_names_that_are_no_text(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/a\xff"))
    folder.mkdir()
    name = os.fsdecode(b"b\xfe.json")
    (folder / name).write_text("{}")
    (folder / "config.json").write_text("{}")
    assert cache.content_hash(folder) == cache.content_hash(folder)
    assert list(cache.named_files([str(folder)], {})) == [str(folder)]


def test_a_full_temporary_folder_is_named(
    tree: SglangTree, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: object) -> None:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))  # without a file's name

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(UsageError, match=r"dsv4doctor-\w+: cannot be written .File too large"):
        trace_launch(request(tree, model), use_cache=False)
