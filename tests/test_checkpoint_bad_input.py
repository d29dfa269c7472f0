"""Whatever lies in a checkpoint's folder: a Checkpoint or one UsageError, and quickly."""

import json
import os
import random
import time
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsv4doctor import jsonio
from dsv4doctor.errors import UsageError
from dsv4doctor.facts.checkpoint import read_checkpoint
from dsv4doctor.models import Checkpoint, StoredFormat

CONFIG, QUANT = "config.json", "hf_quant_config.json"
INDEX = "model.safetensors.index.json"
SHARD = "model-00002-of-00002.safetensors"

EXPERTS = [
    ("weight", "U8", [64, 32]),
    ("weight_scale", "F8_E4M3", [64, 4]),
    ("weight_scale_2", "F32", []),
]
QUANTIZATION = {
    "quant_method": "fp8",
    "quant_algo": "MIXED_PRECISION",
    "moe_quant_algo": "NVFP4",
    "group_size": 16,
    "ignore": ["mtp.*"],
    "quantized_layers": {"layers.0.ffn.experts": {"quant_algo": "NVFP4"}},
    "weight_block_size": [128, 128],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4}}},
}
SMALL = {
    "name": "small",
    "shards": 2,
    "index_metadata": {"total_size": "actual"},
    "config": {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "num_hidden_layers": 1,
        "num_nextn_predict_layers": 1,
        "n_routed_experts": 2,
        "expert_dtype": "fp4",
        "torch_dtype": "bfloat16",
        "quantization_config": QUANTIZATION,
    },
    "hf_quant_config": {
        "quantization": {
            "quant_algo": "MIXED_PRECISION",
            "exclude_modules": ["mtp.*"],
            "quantized_layers": {"layers.0.ffn.experts": {"quant_algo": "NVFP4"}},
        }
    },
    "tensors": [
        {"name": "embed.weight", "dtype": "BF16", "shape": [8, 64], "shard": 1},
        *(
            {
                "name": f"layers.0.ffn.experts.{{expert}}.w1.{part}",
                "dtype": dtype,
                "shape": shape,
                "experts": 2,
                "shard": 1,
            }
            for part, dtype, shape in EXPERTS
        ),
        {
            "name": "mtp.0.ffn.experts.{expert}.w1.weight",
            "dtype": "BF16",
            "shape": [64, 64],
            "experts": 2,
            "shard": 2,
        },
    ],
}


@pytest.fixture
def folder(checkpoint_generator: ModuleType, tmp_path: Path) -> Path:
    """A small whole checkpoint, to be spoiled."""
    checkpoint_generator.build(SMALL, tmp_path / "small")
    return tmp_path / "small"


def refused(folder: Path, message: str) -> str:
    """Read the checkpoint, which must be refused in less than 5 s; the whole message."""
    start = time.process_time()
    with pytest.raises(UsageError, match=message) as caught:
        read_checkpoint(folder)
    assert time.process_time() - start < 5
    assert caught.value.hint
    assert "\n" not in caught.value.message
    return caught.value.message


def edit(path: Path, change) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps(change(content) or content))


def header_of(shard: Path) -> tuple[dict, int]:
    raw = shard.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), len(raw) - 8 - length


def write_header(shard: Path, raw: bytes, payload: int) -> None:
    shard.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(payload))


def test_the_small_checkpoint_is_whole(folder):
    read = read_checkpoint(folder)
    assert read.notes == ()
    assert [layer.stored_format for layer in read.layers] == [StoredFormat.NVFP4, StoredFormat.BF16]
    assert [read.declared_main, read.declared_draft] == [StoredFormat.NVFP4, StoredFormat.MXFP4]


# ------------------------------------------------------------------ files


@pytest.mark.parametrize("name", [CONFIG, QUANT, INDEX])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b'{"architectures": ["Deep', "not JSON"),
        (b"<html>", "not JSON"),
        (b"null", "should be an object, not null"),
        (b"[]", "should be an object, not a list"),
        (b"7", "should be an object, not a number"),
        (b'"text"', "should be an object, not a string"),
        (b'{"a": "\xff"}', "not UTF-8 text"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        (b'{"a": "\\ud800"}', "not valid Unicode text"),
        (b'{"a":' * 100_000, "nested too deeply"),
        # Some Pythons read this and fail when it is written.
        (b'{"a":' + b"[" * 200 + b"]" * 200 + b"}", "nested too deeply"),
        (b'{"a":' + b"[" * 500_000 + b"]" * 500_000 + b"}", "nested too deeply"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "not JSON"),
    ],
)
def test_not_a_json_object(name, content, message, folder):
    (folder / name).write_bytes(content)
    assert refused(folder, message).startswith(str(folder / name))


@pytest.mark.parametrize("name", [CONFIG, QUANT, INDEX, SHARD])
def test_not_a_file(name, folder):
    path = folder / name
    path.unlink()
    path.mkdir()
    refused(folder, f"{name}: a folder where a file should be")
    path.rmdir()
    os.mkfifo(path)
    refused(folder, f"{name}: a pipe, socket or device")


@pytest.mark.parametrize("name", [CONFIG, QUANT, INDEX])
def test_a_link_to_nothing(name, folder):
    (folder / name).unlink()
    (folder / name).symlink_to("nowhere")
    refused(folder, f"{name}: a link to a file that is not there")


@pytest.mark.parametrize("name", [CONFIG, QUANT, INDEX])
def test_a_file_too_large(name, folder):
    with open(folder / name, "r+b") as file:
        file.truncate(1 << 40)
    refused(folder, f"{name}: {1 << 40} bytes, and such a file has at most")


def test_no_config(folder):
    (folder / CONFIG).unlink()
    refused(folder, "config.json: cannot be read")


def test_no_folder(folder):
    refused(folder / "missing", "missing: no such folder")
    refused(folder / CONFIG, "config.json: no such folder")


def test_no_weights(folder):
    for path in folder.iterdir():
        if path.name != CONFIG:
            path.unlink()
    refused(folder, "neither model.safetensors.index.json nor a .safetensors file")


# ------------------------------------------------------------------ config


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("architectures", "DeepseekV4ForCausalLM", "architectures should be a list"),
        ("architectures", [1], "architectures should hold strings, not a number"),
        ("architectures", None, r"not a DeepSeek-V4 family checkpoint \(architectures: none\)"),
        ("architectures", ["LlamaForCausalLM"], r"\(architectures: LlamaForCausalLM\)"),
        ("num_hidden_layers", "x", "num_hidden_layers should be an integer, not a string"),
        ("num_hidden_layers", True, "num_hidden_layers should be an integer, not true"),
        ("num_hidden_layers", 43.5, "num_hidden_layers should be an integer"),
        ("num_hidden_layers", 10**12, "num_hidden_layers should be 1 to 1024"),
        ("num_hidden_layers", -1, "num_hidden_layers should be 1 to 1024"),
        ("num_nextn_predict_layers", 10**12, "num_nextn_predict_layers should be 0 to 64"),
        ("n_routed_experts", [], "n_routed_experts should be an integer, not a list"),
        ("expert_dtype", 4, "expert_dtype should be a string"),
        ("torch_dtype", {}, "torch_dtype should be a string"),
        ("text_config", "x", "text_config should be an object, not a string"),
        ("quantization_config", "fp8", "quantization_config should be an object, not a string"),
        ("quantization_config", [], "quantization_config should be an object, not a list"),
    ],
)
def test_a_config_field_of_the_wrong_type(field, value, message, folder):
    edit(folder / CONFIG, lambda config: config.update({field: value}))
    assert str(folder / CONFIG) in refused(folder, message)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("quant_method", 8, "quant_method should be a string"),
        ("quant_algo", ["NVFP4"], "quant_algo should be a string"),
        ("moe_quant_algo", {}, "moe_quant_algo should be a string"),
        ("ignore", "mtp.*", "ignore should be a list"),
        ("ignore", [None], "ignore should hold strings, not null"),
        ("ignore", ["re:x{}".format("a" * i) for i in range(99)], "are too many"),
        ("ignore", [f"m{i}*" for i in range(3000)], "are too many"),
        ("quantized_layers", [], "quantized_layers should be an object"),
        ("quantized_layers", {"a.experts": 1}, "quantized_layers.a.experts should be an object"),
        ("quantized_layers", {"a.experts": {"quant_algo": 1}}, "quant_algo should be a string"),
        ("config_groups", "x", "config_groups should be an object"),
        ("config_groups", {"g": []}, "config_groups.g should be an object"),
        ("config_groups", {"g": {"weights": 1}}, "weights should be an object"),
        ("config_groups", {"g": {"targets": "Linear"}}, "targets should be a list"),
        ("weight_block_size", 128, "weight_block_size should be a list"),
        ("expert_dtype", 4, "expert_dtype should be a string"),
    ],
)
def test_a_quantization_field_of_the_wrong_type(field, value, message, folder):
    edit(folder / CONFIG, lambda config: config["quantization_config"].update({field: value}))
    assert str(folder / CONFIG) in refused(folder, message)


def test_another_family_names_the_supported_ones(folder):
    edit(folder / CONFIG, lambda config: config.update(architectures=["LlamaForCausalLM"]))
    with pytest.raises(UsageError) as caught:
        read_checkpoint(folder)
    assert "DeepseekV4ForCausalLM, DeepseekV41ForCausalLM" in caught.value.hint


def test_a_quant_config_block_of_the_wrong_type(folder):
    edit(folder / QUANT, lambda content: content.update(quantization=[]))
    assert str(folder / QUANT) in refused(folder, "quantization should be an object")


@pytest.mark.parametrize(
    "expression", ["(a+)+$", "(.*)*x", ".*a.*b.*c.*d.*e.*f", "(", "(a|a)*$", "a{1,99999999999}"]
)
def test_an_expression_that_is_wrong_or_slow_is_noted(expression, folder):
    block = {"quant_method": "compressed-tensors", "ignore": [f"re:{expression}"]}
    edit(folder / CONFIG, lambda config: config.update(quantization_config=block))
    start = time.process_time()
    notes = read_checkpoint(folder).notes
    assert time.process_time() - start < 1
    assert f"module pattern re:{expression} is not evaluated" in notes


# ------------------------------------------------------------------ index


@pytest.mark.parametrize(
    ("shard", "message"),
    [
        ("model-00003-of-00002.safetensors", r"incomplete: .*model-00003.* \(1 of 3 shards"),
        ("../outside.safetensors", "is not the name of a .safetensors file in its folder"),
        ("a/../../outside.safetensors", "is not the name of a .safetensors file"),
        ("/etc/passwd", "is not the name of a .safetensors file"),
        ("/outside.safetensors", "is not the name of a .safetensors file"),
        ("config.json", "is not the name of a .safetensors file"),
        ("", "is not the name of a .safetensors file"),
        ("x\0.safetensors", "is not the name of a .safetensors file"),
        ("\x1b[31m.safetensors", r"'\\x1b\[31m.safetensors'"),
        (None, "embed.weight should have its shard's name, a string"),
        (1, "embed.weight should have its shard's name, a string"),
        (["x"], "embed.weight should have its shard's name, a string"),
    ],
)
def test_an_index_with_a_bad_shard(shard, message, folder):
    (folder.parent / "outside.safetensors").write_bytes((folder / SHARD).read_bytes())
    edit(folder / INDEX, lambda index: index["weight_map"].update({"embed.weight": shard}))
    assert str(folder) in refused(folder, message)


@pytest.mark.parametrize("weight_map", [None, {}, [], "x"])
def test_an_index_without_a_weight_map(weight_map, folder):
    edit(folder / INDEX, lambda index: index.update(weight_map=weight_map))
    refused(folder, "weight_map should be an object with entries")


def test_odd_but_readable_indexes(folder):
    def change(index):
        index["metadata"] = {"total_size": "many"}
        index["weight_map"]["lost.weight"] = SHARD
        del index["weight_map"]["mtp.0.ffn.experts.1.w1.weight"]

    edit(folder / INDEX, change)
    assert read_checkpoint(folder).notes == (
        "the index's total_size is many, the shards hold 22024 bytes",
        "lost.weight: in the index, not in the shard it names (1 such tensors)",
        "mtp.0.ffn.experts.1.w1.weight: in a shard, not in the index under it (1 such tensors)",
    )


# ------------------------------------------------------------------ shards


@pytest.mark.parametrize("length", [0, 1, 2**63, 2**64 - 1, 10_000_000_000, 99_999])
def test_a_header_that_lies_about_its_length(length, folder):
    raw = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(length.to_bytes(8, "little") + raw[8:])
    refused(folder, f"{SHARD}: not a whole safetensors file: its header should be {length} bytes")


def test_a_header_of_gigabytes(folder):
    with open(folder / SHARD, "r+b") as file:
        file.write((5 << 30).to_bytes(8, "little"))
        file.truncate(6 << 30)
    refused(folder, f"a header of {5 << 30} bytes, where safetensors allows 100000000")


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 100, -1])
def test_a_truncated_shard(size, folder):
    raw = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(raw[:size])
    refused(folder, f"{SHARD}: not a whole safetensors file")


def test_a_shard_with_bytes_behind_its_data(folder):
    with open(folder / SHARD, "ab") as file:
        file.write(b"x")
    refused(folder, "describes 16384 bytes of data, the file has 16385")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"data_offsets": [0, 8192]}, "its tensors overlap"),
        ({"data_offsets": [8192, 1 << 40]}, "takes 1099511619584 bytes by its offsets and 8192"),
        ({"data_offsets": [8193, 16385]}, "leave a gap"),
        ({"data_offsets": [-8192, 0]}, "overlap"),
        ({"data_offsets": [16384, 8192]}, "takes -8192 bytes"),
        ({"data_offsets": [8192.0, 16384.0]}, "not an integer"),
        ({"data_offsets": [False, True]}, "not an integer"),
        ({"data_offsets": [8192]}, "ill-formed"),
        ({"data_offsets": None}, "ill-formed"),
        ({"shape": [64, 65]}, "takes 8192 bytes by its offsets and 8320 by"),
        ({"shape": [-64, -64]}, "ill-formed"),
        ({"shape": [64.0, 64.0]}, "not an integer"),
        ({"shape": ["64", "64"]}, "not an integer"),
        ({"shape": "64"}, "ill-formed"),
        ({"shape": [10**4000] * 200}, "ill-formed"),
        ({"shape": [1] * 99}, "ill-formed"),
        ({"dtype": "F32"}, "takes 8192 bytes by its offsets and 16384 by"),
        ({"dtype": 16}, "ill-formed"),
        ({"dtype": ["BF16"]}, "ill-formed"),
        ({"dtype": None}, "ill-formed"),
    ],
)
def test_a_tensor_entry_that_does_not_fit(entry, message, folder):
    header, payload = header_of(folder / SHARD)
    header["mtp.0.ffn.experts.1.w1.weight"].update(entry)
    write_header(folder / SHARD, json.dumps(header).encode(), payload)
    assert SHARD in refused(folder, message)


@pytest.mark.parametrize("entry", [None, [], "x", 1, {}, {"dtype": "U8"}])
def test_a_tensor_entry_of_the_wrong_type(entry, folder):
    header, payload = header_of(folder / SHARD)
    header["mtp.0.ffn.experts.1.w1.weight"] = entry
    write_header(folder / SHARD, json.dumps(header).encode(), payload)
    refused(folder, "tensor mtp.0.ffn.experts.1.w1.weight is ill-formed")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"[]" + b" " * 8, "its header does not start with '{'"),
        (b' {"a": 1}', "its header does not start with '{'"),
        (b'{"a": 1' + b" " * 9, "header: not JSON"),
        (b'{"\xff": 1}', "header: not UTF-8"),
        (b'{"a":' * 50_000, "nested too deeply"),
        (b'{"__metadata__": 1}', "its __metadata__ is not an object"),
    ],
)
def test_a_header_that_is_not_one(raw, message, folder):
    write_header(folder / SHARD, raw, 16384)
    refused(folder, message)


def test_a_tensor_named_twice(folder):
    header, payload = header_of(folder / SHARD)
    raw = json.dumps(header).replace("experts.1.", "experts.0.").encode()
    write_header(folder / SHARD, raw, payload)
    refused(folder, "its header names mtp.0.ffn.experts.0.w1.weight twice")


def test_an_unknown_dtype_is_noted(folder):
    header, payload = header_of(folder / SHARD)
    for entry in header.values():
        entry["dtype"] = "F2_NEW"
    write_header(folder / SHARD, json.dumps(header).encode(), payload)
    read = read_checkpoint(folder)
    assert "unknown dtypes: F2_NEW" in read.notes
    assert [layer.stored_format for layer in read.draft_layers] == [StoredFormat.OTHER]


def test_tensors_in_another_order_than_their_data(folder):
    header, payload = header_of(folder / SHARD)
    raw = json.dumps(dict(reversed(header.items()))).encode()
    write_header(folder / SHARD, raw, payload)
    assert read_checkpoint(folder).notes == ()


# ------------------------------------------------------------------ anything at all

JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 2**65)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["re:(", "re:.*", "*", "mtp.*", "BF16", "F4", "fp8", "compressed-tensors"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.text(max_size=4) | st.sampled_from(["dtype", "targets", "weights", "quant_algo"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)


def replace_somewhere(content, chooser: random.Random, junk):
    """`content` with one value, anywhere in it, replaced by `junk`."""
    if isinstance(content, dict | list) and content and chooser.random() < 0.85:
        keys = list(content) if isinstance(content, dict) else range(len(content))
        key = chooser.choice(keys)
        content[key] = replace_somewhere(content[key], chooser, junk)
        return content
    return junk


def spoil_bytes(raw: bytes, chooser: random.Random) -> bytes:
    for _ in range(chooser.randint(1, 3)):
        at, end = sorted(chooser.randrange(len(raw) + 1) for _ in range(2))
        noise = chooser.randbytes(chooser.randint(0, 4))
        kind = chooser.randrange(4)
        if kind == 0:
            raw = raw[:at] + noise + raw[at + len(noise) :]
        elif kind == 1:
            raw = raw[:at] + noise + raw[at:]
        elif kind == 2:
            raw = raw[:at] + raw[min(end, at + 9) :]
        else:
            raw = raw[:at]
    return raw


def reads_or_refuses(folder: Path) -> None:
    """A Checkpoint that can be written as JSON, or a UsageError."""
    try:
        read = read_checkpoint(folder)
    except UsageError:
        return
    plain = json.loads(jsonio.dump(jsonio.to_plain(read)).encode())
    assert isinstance(jsonio.from_plain(plain, Checkpoint, "snapshot"), Checkpoint)


FUZZ = settings(
    max_examples=600,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@FUZZ
@given(
    name=st.sampled_from([CONFIG, CONFIG, QUANT, INDEX, SHARD]),
    junk=JUNK,
    seed=st.integers(0, 2**32),
)
def test_any_value_anywhere(folder, name, junk, seed):
    path, before = folder / name, (folder / name).read_bytes()
    chooser = random.Random(seed)
    try:
        if name == SHARD:
            header, payload = header_of(path)
            raw = json.dumps(replace_somewhere(header, chooser, junk)).encode()
            write_header(path, raw, payload)
        else:
            path.write_text(json.dumps(replace_somewhere(json.loads(before), chooser, junk)))
        reads_or_refuses(folder)
    finally:
        path.write_bytes(before)


@FUZZ
@given(name=st.sampled_from([CONFIG, QUANT, INDEX, SHARD]), seed=st.integers(0, 2**32))
def test_any_bytes_anywhere(folder, name, seed):
    path, before = folder / name, (folder / name).read_bytes()
    chooser = random.Random(seed)
    try:
        if name == SHARD:
            header = json.dumps(header_of(path)[0]).encode()
            write_header(path, spoil_bytes(header, chooser), 16384)
            if chooser.random() < 0.3:
                path.write_bytes(spoil_bytes(before, chooser))
        else:
            path.write_bytes(spoil_bytes(before, chooser))
        reads_or_refuses(folder)
    finally:
        path.write_bytes(before)
