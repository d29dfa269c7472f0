"""Facts of the published checkpoints, built at full depth from their specs."""

import ast
import json
import os
import re
import struct
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Optional

import pytest

from dsv4doctor import jsonio
from dsv4doctor.errors import UsageError
from dsv4doctor.facts.checkpoint import materialise, read_checkpoint
from dsv4doctor.models import Checkpoint, StoredFormat

NVFP4, MXFP4, FP8, BF16, INT4, MISSING = (
    StoredFormat.NVFP4,
    StoredFormat.MXFP4,
    StoredFormat.FP8_BLOCK,
    StoredFormat.BF16,
    StoredFormat.INT4,
    StoredFormat.MISSING,
)
SPECS = Path(__file__).parent / "checkpoints"
FLASH = "deepseek-ai__DeepSeek-V4-Flash"
HYBRID = "nvidia__DeepSeek-V4-Flash-NVFP4"

# main layers, stored main, stored draft, declared main, declared draft, draft stages
PUBLISHED = {
    "Rarri__DeepSeek-V4-Flash-0731-NVFP4": (43, NVFP4, NVFP4, NVFP4, NVFP4, 3),
    "RedHatAI__DeepSeek-V4-Flash-NVFP4-FP8": (43, NVFP4, MISSING, NVFP4, NVFP4, 0),
    "canada-quant__DeepSeek-V4-Flash-NVFP4-FP8-MTP": (43, NVFP4, BF16, NVFP4, BF16, 1),
    "canada-quant__DeepSeek-V4-Flash-W4A16-FP8-MTP": (43, INT4, BF16, INT4, BF16, 1),
    "canada-quant__DeepSeek-V4-Flash-W4A16-FP8": (43, INT4, MISSING, INT4, BF16, 0),
    "canada-quant__DeepSeek-V4-Pro-NVFP4-FP8-MTP": (61, NVFP4, MXFP4, NVFP4, NVFP4, 1),
    "deepseek-ai__DeepSeek-V4-Flash-0731": (43, MXFP4, MXFP4, MXFP4, MXFP4, 3),
    "deepseek-ai__DeepSeek-V4-Flash-Base": (43, FP8, FP8, FP8, FP8, 1),
    "deepseek-ai__DeepSeek-V4-Flash-Vision-Exp": (43, MXFP4, MXFP4, MXFP4, MXFP4, 3),
    "deepseek-ai__DeepSeek-V4-Flash": (43, MXFP4, MXFP4, MXFP4, MXFP4, 1),
    "deepseek-ai__DeepSeek-V4-Pro-0813": (61, MXFP4, MXFP4, MXFP4, MXFP4, 3),
    "deepseek-ai__DeepSeek-V4-Pro": (61, MXFP4, MXFP4, MXFP4, MXFP4, 1),
    "deepseek-ai__DeepSeek-V4.1-Flash": (40, MXFP4, MXFP4, MXFP4, MXFP4, 3),
    "nvidia__DeepSeek-V4-Flash-0731-NVFP4": (43, NVFP4, MXFP4, NVFP4, MXFP4, 3),
    "nvidia__DeepSeek-V4-Flash-NVFP4": (43, NVFP4, MXFP4, NVFP4, MXFP4, 1),
    "nvidia__DeepSeek-V4-Flash-nvfp4-DSpark": (43, NVFP4, NVFP4, NVFP4, NVFP4, 3),
    "nvidia__DeepSeek-V4-Pro-0813-NVFP4": (61, NVFP4, MXFP4, NVFP4, MXFP4, 3),
    "nvidia__DeepSeek-V4-Pro-NVFP4": (61, NVFP4, MXFP4, NVFP4, MXFP4, 1),
    "nvidia__DeepSeek-V4.1-Flash-NVFP4": (40, NVFP4, MXFP4, NVFP4, MXFP4, 3),
    "sgl-project__DeepSeek-V4-Flash-FP8": (43, FP8, FP8, FP8, FP8, 1),
    "sgl-project__DeepSeek-V4-Pro-FP8": (61, FP8, FP8, FP8, FP8, 1),
}


def formats(checkpoint: Checkpoint) -> tuple[object, ...]:
    """The same six facts as in PUBLISHED; a set where layers differ."""
    main = {layer.stored_format for layer in checkpoint.main_layers}
    draft = {layer.stored_format for layer in checkpoint.draft_layers}
    return (
        len(checkpoint.main_layers),
        main.pop() if len(main) == 1 else main,
        draft.pop() if len(draft) == 1 else draft,
        checkpoint.declared_main,
        checkpoint.declared_draft,
        checkpoint.draft_stages,
    )


def test_every_spec_is_expected():
    assert sorted(PUBLISHED) == sorted(path.stem for path in SPECS.glob("*.json"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_checkpoint(name, checkpoint, checkpoint_generator: ModuleType):
    spec = json.loads((SPECS / f"{name}.json").read_text())
    inventory = checkpoint_generator.inventory(spec)
    read = read_checkpoint(checkpoint(name))

    assert formats(read) == PUBLISHED[name]
    assert read.tensor_count == spec["checks"].get("tensor_count", len(inventory))
    payload = sum(size for _, _, size, _ in inventory.values())
    assert read.payload_bytes == spec["checks"].get("payload_bytes", payload)
    assert read.shard_count == spec["shards"]
    text = spec["config"].get("text_config", spec["config"])
    assert read.text_config == text
    assert {layer.experts for layer in read.main_layers} == {text["n_routed_experts"]}
    for layer in read.draft_layers:
        names = {key.split(".")[4] for key in inventory if key.startswith(f"{layer.name}.")}
        assert layer.experts == len(names)

    stored = [tensor for tensor in read.tensors if tensor.dtype]
    assert [
        tensor
        for tensor in stored
        if inventory[tensor.name][:2] != [tensor.dtype, list(tensor.shape)]
    ] == []
    above_zero = re.compile(r"\.experts\.[1-9]")
    kept = {key for key in inventory if not above_zero.search(key)}
    assert {tensor.name for tensor in stored} == kept


def test_details_name_the_dtypes(checkpoint):
    read = read_checkpoint(checkpoint(HYBRID))
    main, draft = read.main_layers[3], read.draft_layers[0]
    assert main.name == "layers.3.ffn.experts"
    assert main.detail == "U8 + F8_E4M3 weight_scale per 16 + F32 weight_scale_2"
    assert draft.name == "mtp.0.ffn.experts"
    assert draft.detail == "I8 + F8_E8M0 scale per 32"


@pytest.mark.parametrize(
    ("name", "variant", "declared"),
    [
        (FLASH, "no-expert-dtype", (FP8, FP8)),
        ("deepseek-ai__DeepSeek-V4-Pro", "no-expert-dtype", (FP8, FP8)),
        (HYBRID, "old-hf-quant-config", (NVFP4, MXFP4)),
        ("nvidia__DeepSeek-V4-Pro-NVFP4", "old-hf-quant-config", (NVFP4, MXFP4)),
        (HYBRID, "synthetic-no-moe-quant-algo", (NVFP4, MXFP4)),
        (HYBRID, "synthetic-no-group-size", (NVFP4, MXFP4)),
        (HYBRID, "synthetic-no-mtp-ignore", (NVFP4, NVFP4)),
        ("canada-quant__DeepSeek-V4-Flash-NVFP4-FP8-MTP", "ignore-layer-43", (NVFP4, BF16)),
        ("RedHatAI__DeepSeek-V4-Flash-NVFP4-FP8", "lm-head-name", (NVFP4, NVFP4)),
        ("sgl-project__DeepSeek-V4-Flash-FP8", "model-type-deepseek-v4", (FP8, FP8)),
        ("sgl-project__DeepSeek-V4-Pro-FP8", "model-type-deepseek-v4", (FP8, FP8)),
    ],
)
def test_variant_changes_only_what_is_declared(name, variant, declared, checkpoint):
    read = read_checkpoint(checkpoint(name, experts=2, variant=variant))
    assert (read.declared_main, read.declared_draft) == declared
    assert formats(read)[:3] == PUBLISHED[name][:3]


@pytest.mark.parametrize(
    ("name", "variant", "note"),
    [
        (HYBRID, None, "the index's total_size is 159609485896, the shards hold"),
        (
            "sgl-project__DeepSeek-V4-Flash-FP8",
            None,
            "layers.0.attn.wo_a.scale: in the index, not in the shard it names (43 such tensors)",
        ),
        (
            "deepseek-ai__DeepSeek-V4-Flash-0731",
            None,
            "num_nextn_predict_layers is 1, and 3 draft stages are stored",
        ),
        (
            "RedHatAI__DeepSeek-V4-Flash-NVFP4-FP8",
            None,
            "num_nextn_predict_layers is 1, and 0 draft stages are stored",
        ),
        (
            HYBRID,
            "synthetic-no-mtp-ignore",
            "hf_quant_config.json disagrees with config.json: excluded modules differ by mtp.*",
        ),
        (HYBRID, "old-hf-quant-config", "config.json has no quantization_config"),
        (FLASH, None, "layers.0.ffn.experts: 2 routed experts stored, 256 configured (43 such"),
    ],
)
def test_notes(name, variant, note, checkpoint):
    read = read_checkpoint(checkpoint(name, experts=2, variant=variant))
    assert [text for text in read.notes if text.startswith(note)]


def test_a_whole_stock_checkpoint_has_no_notes(checkpoint):
    assert read_checkpoint(checkpoint(FLASH)).notes == ()


def test_json_and_back(checkpoint):
    read = read_checkpoint(checkpoint("nvidia__DeepSeek-V4.1-Flash-NVFP4", experts=2))
    plain = json.loads(jsonio.dump(jsonio.to_plain(read)))
    assert jsonio.from_plain(plain, Checkpoint, "snapshot") == read


# ------------------------------------------------------------------ naming and mixtures


def rename_tensors(target: Path, rename) -> None:
    """Rename the tensors of the checkpoint in `target`, in headers and index."""
    for shard in target.glob("*.safetensors"):
        edit_header(shard, lambda header: {rename(name): entry for name, entry in header.items()})
    path = target / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] = {rename(name): shard for name, shard in index["weight_map"].items()}
    path.write_text(json.dumps(index))


def edit_header(shard: Path, edit) -> None:
    with open(shard, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    payload = shard.stat().st_size - 8 - length
    raw = json.dumps(edit(header)).encode()
    with open(shard, "wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + payload)


def hugging_face_name(name: str) -> str:
    """V3's naming, with the draft as the layer after the last."""
    name = name.replace("mtp.0.", "layers.43.").replace(".ffn.", ".mlp.")
    for old, new in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
        name = name.replace(f".{old}.", f".{new}.")
    return f"model.{name}" if name.startswith("layers.") else name


def test_hugging_face_names(checkpoint, copy_checkpoint, tmp_path):
    folder = copy_checkpoint(checkpoint(FLASH, experts=2), tmp_path / "renamed")
    rename_tensors(folder, hugging_face_name)
    read = read_checkpoint(folder)
    assert formats(read) == PUBLISHED[FLASH]
    assert read.draft_layers[0].name == "model.layers.43.mlp.experts"


def test_a_layer_stored_in_another_format_is_seen(checkpoint, copy_checkpoint, tmp_path):
    def edit(header):
        for name, entry in header.items():
            if ".experts." in name and name.endswith(".scale"):
                entry["dtype"] = "F8_E4M3"
        return header

    folder = copy_checkpoint(checkpoint(FLASH, experts=2), tmp_path / "mixed")
    edit_header(folder / "model-00007-of-00046.safetensors", edit)
    read = read_checkpoint(folder)
    odd = [layer.index for layer in read.main_layers if layer.stored_format is not MXFP4]
    assert odd == [5]
    assert read.main_layers[5].detail == "I8 + F8_E4M3 scale per 32"
    assert "main layers are stored in several formats: MXFP4, other" in read.notes


def test_a_single_expert_of_another_dtype_is_seen(checkpoint, copy_checkpoint, tmp_path):
    def edit(header):
        header["layers.5.ffn.experts.1.w2.weight"]["dtype"] = "U8"
        return header

    folder = copy_checkpoint(checkpoint(FLASH, experts=2), tmp_path / "mixed")
    edit_header(folder / "model-00007-of-00046.safetensors", edit)
    layer = read_checkpoint(folder).main_layers[5]
    assert layer.stored_format is StoredFormat.OTHER
    assert layer.detail == "experts differ from each other: F8_E8M0, I8, U8"


def test_nvfp4_needs_a_global_scale(checkpoint, copy_checkpoint, tmp_path):
    folder = copy_checkpoint(checkpoint(HYBRID, experts=1), tmp_path / "copy")
    rename_tensors(folder, lambda name: name.replace("weight_scale_2", "other_scale"))
    layer = read_checkpoint(folder).main_layers[0]
    assert layer.stored_format is StoredFormat.OTHER
    assert layer.detail == "U8 + F8_E4M3 weight_scale per 16"


@pytest.mark.parametrize(
    ("second", "declared"), [("NVFP4", NVFP4), ("FP8", StoredFormat.OTHER), (None, NVFP4)]
)
def test_quantized_layers_of_several_algorithms(
    second, declared, checkpoint, copy_checkpoint, tmp_path
):
    folder = copy_checkpoint(checkpoint(HYBRID, experts=1), tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    block = config["quantization_config"]
    del block["moe_quant_algo"]
    block["quantized_layers"] = {
        f"layers.{layer}.ffn.experts.0.{projection}": {"quant_algo": algorithm}
        for layer in range(43)
        for projection, algorithm in (("w1", "NVFP4"), ("w2", second))
    }
    (folder / "config.json").write_text(json.dumps(config))
    assert read_checkpoint(folder).declared_main is declared


def test_without_an_index(checkpoint, copy_checkpoint, tmp_path):
    folder = copy_checkpoint(checkpoint(FLASH, experts=2), tmp_path / "bare")
    (folder / "model.safetensors.index.json").unlink()
    read = read_checkpoint(folder)
    assert formats(read) == PUBLISHED[FLASH]
    assert not read.indexed


# ------------------------------------------------------------------ content key


def test_a_shard_whose_name_is_no_text(checkpoint, copy_checkpoint, tmp_path):
    folder = copy_checkpoint(checkpoint(HYBRID, experts=2), tmp_path / "bare")
    (folder / "model.safetensors.index.json").unlink()
    key = read_checkpoint(folder).content_key
    shard = folder / "model-00046-of-00046.safetensors"
    keys = {key}
    for name in (b"model-00046-\xff.safetensors", b"model-00046-\xfe.safetensors"):
        shard = shard.rename(folder / os.fsdecode(name))
        keys.add(read_checkpoint(folder, tmp_path / "cache").content_key)
    assert len(keys) == 3
    assert read_checkpoint(folder, tmp_path / "cache") == read_checkpoint(folder)


def test_content_key_is_of_the_content(checkpoint, copy_checkpoint, tmp_path):
    folder = checkpoint(HYBRID, experts=2)
    key = read_checkpoint(folder).content_key
    copy = copy_checkpoint(folder, tmp_path / "copy")
    assert read_checkpoint(copy).content_key == key
    keys = {key}
    shard = copy / "model-00002-of-00046.safetensors"
    for change in (
        lambda: (copy / "config.json").write_text((copy / "config.json").read_text() + " "),
        lambda: (copy / "hf_quant_config.json").unlink(),
        lambda: edit_header(shard, lambda header: dict(reversed(header.items()))),
    ):
        change()
        keys.add(read_checkpoint(copy).content_key)
    assert len(keys) == 4


def test_facts_from_the_cache_are_the_same(checkpoint, copy_checkpoint, tmp_path):
    folder = copy_checkpoint(checkpoint(HYBRID, experts=2), tmp_path / "copy")
    cache = tmp_path / "cache"
    read = read_checkpoint(folder, cache)
    (entry,) = cache.iterdir()
    assert read_checkpoint(folder, cache) == read == read_checkpoint(folder)

    entry.write_text(entry.read_text().replace("weight_scale per 16", "from the cache"))
    assert "from the cache" in read_checkpoint(folder, cache).layers[0].detail
    moved = folder.rename(tmp_path / "moved")
    assert read_checkpoint(moved, cache).path == str(moved)

    edit_header(
        moved / "model-00002-of-00046.safetensors", lambda header: dict(reversed(header.items()))
    )
    assert "weight_scale per 16" in read_checkpoint(moved, cache).layers[0].detail
    assert len(list(cache.iterdir())) == 2


def test_a_shard_that_grew_is_refused_with_a_cache_too(checkpoint, copy_checkpoint, tmp_path):
    folder = copy_checkpoint(checkpoint(HYBRID, experts=2), tmp_path / "copy")
    read_checkpoint(folder, tmp_path / "cache")
    with open(folder / "model-00002-of-00046.safetensors", "r+b") as file:
        file.truncate(file.seek(0, os.SEEK_END) + 1)
    with pytest.raises(UsageError, match="model-00002-of-00046"):
        read_checkpoint(folder, tmp_path / "cache")


def test_facts_from_the_cache_need_no_look_into_the_index(
    checkpoint, copy_checkpoint, tmp_path, monkeypatch
):
    """Parsing it takes longer than all else that a repeated trace does."""
    folder = copy_checkpoint(checkpoint(HYBRID, experts=2), tmp_path / "copy")
    read = read_checkpoint(folder, tmp_path / "cache")
    monkeypatch.setattr("dsv4doctor.facts.checkpoint.parse_index", None)
    assert read_checkpoint(folder, tmp_path / "cache") == read


def test_an_index_changed_in_place_misses_the_cache(checkpoint, copy_checkpoint, tmp_path):
    """By its bytes: size and times stay as they were."""
    folder = copy_checkpoint(checkpoint(HYBRID, experts=2), tmp_path / "copy")
    read = read_checkpoint(folder, tmp_path / "cache")
    index = folder / "model.safetensors.index.json"
    times = index.stat()
    size = json.loads(index.read_text())["metadata"]["total_size"]
    index.write_text(index.read_text().replace(str(size), str(size - 1)))
    os.utime(index, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert index.stat().st_size == times.st_size
    changed = read_checkpoint(folder, tmp_path / "cache")
    assert changed.content_key != read.content_key
    assert f"the index's total_size is {size - 1}" in "".join(changed.notes)


def test_a_shard_that_was_removed_is_missed_with_a_cache_too(checkpoint, copy_checkpoint, tmp_path):
    folder = copy_checkpoint(checkpoint(HYBRID, experts=2), tmp_path / "copy")
    read_checkpoint(folder, tmp_path / "cache")
    (folder / "model-00002-of-00046.safetensors").unlink()
    with pytest.raises(UsageError, match=r"model-00002-of-00046\.safetensors, which is not there"):
        read_checkpoint(folder, tmp_path / "cache")


@pytest.mark.parametrize("stray", ["whole", "broken"])
def test_the_cache_knows_a_shard_that_the_index_does_not_name(
    stray, checkpoint, copy_checkpoint, tmp_path
):
    folder = copy_checkpoint(checkpoint(HYBRID, experts=2), tmp_path / "copy")
    read = read_checkpoint(folder)
    path = folder / os.fsdecode(b"stray\xff.safetensors")
    if stray == "whole":
        os.link(folder / "model-00002-of-00046.safetensors", path)
    else:
        path.write_bytes(b"x")
    for _ in range(2):
        assert read_checkpoint(folder, tmp_path / "cache") == read
    (entry,) = (tmp_path / "cache").iterdir()
    entry.write_text(entry.read_text().replace("weight_scale per 16", "from the cache"))
    assert "from the cache" in read_checkpoint(folder, tmp_path / "cache").layers[0].detail


def test_a_cache_that_cannot_be_used_is_ignored(checkpoint, tmp_path):
    folder = checkpoint(HYBRID, experts=2)
    read = read_checkpoint(folder)
    (tmp_path / "file").write_text("")
    assert read_checkpoint(folder, tmp_path / "file" / "cache") == read
    read_checkpoint(folder, tmp_path / "cache")
    (entry,) = (tmp_path / "cache").iterdir()
    for content in ("", "null", "{}", "[" * 100_000, '{"content_key": 1}'):
        entry.write_text(content)
        assert read_checkpoint(folder, tmp_path / "cache") == read


# ------------------------------------------------------------------ materialise

# Experts called weight_packed are not seen: the draft's answer, or nothing does.
PROBED_OTHERWISE = {
    "RedHatAI__DeepSeek-V4-Flash-NVFP4-FP8": None,
    "canada-quant__DeepSeek-V4-Flash-W4A16-FP8": None,
    "canada-quant__DeepSeek-V4-Flash-NVFP4-FP8-MTP": "BF16",
    "canada-quant__DeepSeek-V4-Flash-W4A16-FP8-MTP": "BF16",
}


@pytest.fixture(scope="module", params=["0.5.14", "0.5.23"])
def expert_probe(request, sglang_tree):
    """SGLang's probe for the dtype of the routed experts.

    Its own function, taken out of its file: importing the file would take torch.
    """
    root = Path(sglang_tree(request.param).root)
    source = (root / "sglang/srt/model_loader/weight_utils.py").read_text()
    wanted = ("probe_routed_expert_weight_dtype", "_ROUTED_EXPERT_KEY_RE")
    body = [
        node
        for node in ast.parse(source).body
        if getattr(node, "name", None) in wanted
        or (isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) in wanted)
    ]
    assert len(body) == 2
    names = {"re": re, "os": os, "json": json, "struct": struct, "Path": Path, "Optional": Optional}
    exec(compile(ast.Module(body, []), "weight_utils.py", "exec"), names)
    return names[wanted[0]]


@pytest.mark.wheels
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_expert_probe_answers_the_same(name, expert_probe, checkpoint, tmp_path):
    original = checkpoint(name, experts=2)
    folder = materialise(read_checkpoint(original), tmp_path / "new")
    by_format = {NVFP4: "U8", MXFP4: "I8", FP8: "F8_E4M3"}
    answer = PROBED_OTHERWISE.get(name, by_format.get(PUBLISHED[name][1]))
    assert expert_probe(str(original)) == answer
    assert expert_probe(str(folder)) == answer


@pytest.mark.parametrize("name", PUBLISHED)
def test_materialised_folder_reads_the_same(name, checkpoint, tmp_path):
    original = checkpoint(name, experts=2)
    read = read_checkpoint(original)
    folder = materialise(read, tmp_path / "new")
    again = read_checkpoint(folder)

    assert formats(again) == formats(read)
    assert again.tensors == read.tensors
    assert (again.config, again.hf_quant_config) == (read.config, read.hf_quant_config)


@pytest.mark.wheels
@pytest.mark.parametrize("experts", [1, 2])
def test_the_probe_answers_the_same_when_a_later_expert_comes_first(
    experts, expert_probe, checkpoint, copy_checkpoint, tmp_path
):
    """The index may name the last expert of a draft layer before any other."""
    folder = copy_checkpoint(checkpoint(HYBRID, experts=experts), tmp_path / "shuffled")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    first = f"mtp.0.ffn.experts.{experts - 1}."
    names = sorted(index["weight_map"], key=lambda name: not name.startswith(first))
    index["weight_map"] = {name: index["weight_map"][name] for name in names}
    path.write_text(json.dumps(index))

    assert expert_probe(str(folder)) == "I8"
    new = materialise(read_checkpoint(folder), tmp_path / "new")
    assert expert_probe(str(new)) == "I8"


def test_materialise_keeps_what_is_there(checkpoint, tmp_path):
    read = read_checkpoint(checkpoint(FLASH, experts=2))
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="not empty"):
        materialise(read, tmp_path)
    assert os.listdir(tmp_path) == ["mine.txt"]


def test_materialise_stays_inside_the_folder(checkpoint, tmp_path):
    read = read_checkpoint(checkpoint(FLASH, experts=2))
    outside = replace(read.tensors[0], shard="../outside.safetensors")
    with pytest.raises(UsageError, match="outside"):
        materialise(replace(read, tensors=(outside,)), tmp_path / "new")
    assert os.listdir(tmp_path) == []
