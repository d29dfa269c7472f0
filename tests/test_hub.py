"""From what a launch calls its model to the folder that holds it."""

import pytest

from dsv4doctor.errors import UsageError
from dsv4doctor.facts.checkpoint import read_checkpoint, resolve_model
from dsv4doctor.models import StoredFormat

MODEL = "nvidia/DeepSeek-V4-Flash-NVFP4"


@pytest.fixture
def hub(checkpoint, copy_checkpoint, tmp_path):
    """A hub cache that holds one model, as the hub's client lays it out; its root."""
    repository = tmp_path / "hub" / "models--nvidia--DeepSeek-V4-Flash-NVFP4"
    snapshot = repository / "snapshots" / "48bfe38c"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("48bfe38c")
    blobs = copy_checkpoint(
        checkpoint("nvidia__DeepSeek-V4-Flash-NVFP4", experts=2), repository / "blobs"
    )
    snapshot.mkdir(parents=True)
    for blob in blobs.iterdir():
        (snapshot / blob.name).symlink_to(f"../../blobs/{blob.name}")
    return tmp_path / "hub"


@pytest.mark.parametrize("how", ["HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "HOME"])
def test_a_model_in_the_hub_cache(how, hub, tmp_path):
    places = {"HF_HUB_CACHE": hub, "HF_HOME": tmp_path}
    if how in ("XDG_CACHE_HOME", "HOME"):
        cache = tmp_path / "home" / ".cache"
        (cache / "huggingface").mkdir(parents=True)
        (cache / "huggingface" / "hub").symlink_to(hub)
        places |= {"XDG_CACHE_HOME": cache, "HOME": tmp_path / "home"}
    folder = resolve_model(MODEL, {how: str(places[how])})
    read = read_checkpoint(folder)
    assert read.name == MODEL
    assert {layer.stored_format for layer in read.main_layers} == {StoredFormat.NVFP4}


@pytest.mark.parametrize("revision", ["nvfp4-v2", "0123abcd"])
def test_a_revision_of_a_model(revision, hub, tmp_path):
    """As --revision says it: a branch or tag, or a commit."""
    repository = hub / "models--nvidia--DeepSeek-V4-Flash-NVFP4"
    (repository / "snapshots" / "0123abcd").symlink_to("48bfe38c")
    (repository / "refs" / "nvfp4-v2").write_text("0123abcd")
    found = resolve_model(MODEL, {"HF_HUB_CACHE": str(hub)}, revision)
    assert found == repository / "snapshots" / "0123abcd"
    assert resolve_model(str(tmp_path), {}, revision) == tmp_path
    for absent in ("other", "../refs", "..", "a/b"):
        with pytest.raises(UsageError, match=r"is not (there|in the hub cache)"):
            resolve_model(MODEL, {"HF_HUB_CACHE": str(hub)}, absent)


def test_a_folder_is_itself(tmp_path):
    assert resolve_model(str(tmp_path), {}) == tmp_path


def test_a_partly_downloaded_snapshot(hub):
    blobs = hub / "models--nvidia--DeepSeek-V4-Flash-NVFP4" / "blobs"
    (blobs / "model-00003-of-00046.safetensors").unlink()
    with pytest.raises(UsageError, match=r"partly downloaded \(45 of 46 shards\)") as caught:
        resolve_model(MODEL, {"HF_HUB_CACHE": str(hub)})
    assert MODEL in caught.value.hint


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("nvidia/DeepSeek-V9", "neither a folder nor in the hub cache at"),
        ("./missing", "no such folder"),
        ("/missing/folder", "no such folder"),
        ("../../models", "no such folder"),
        ("", "no such folder"),
        ("a/b/c", "no such folder"),
        ("nul\0", "no such folder"),
    ],
)
def test_no_such_model(model, message, hub):
    with pytest.raises(UsageError, match=message) as caught:
        resolve_model(model, {"HF_HUB_CACHE": str(hub)})
    assert caught.value.hint


@pytest.mark.parametrize("content", [b"", b"..", b"../../x", b"\xff\xfe", b"unknown", b"a" * 9999])
def test_a_bad_reference(content, hub):
    (hub / "models--nvidia--DeepSeek-V4-Flash-NVFP4" / "refs" / "main").write_bytes(content)
    with pytest.raises(UsageError, match="main"):
        resolve_model(MODEL, {"HF_HUB_CACHE": str(hub)})


def test_a_snapshot_that_lacks_what_only_the_index_names(hub):
    """Read anyway, it is refused as partly downloaded."""
    folder = resolve_model(MODEL, {"HF_HUB_CACHE": str(hub)})
    index = (folder / "model.safetensors.index.json").read_text()
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model.safetensors.index.json").write_text(index.replace("00046-of", "00047-of"))
    with pytest.raises(UsageError, match=r"only partly downloaded: the index names model-00047"):
        read_checkpoint(folder)
