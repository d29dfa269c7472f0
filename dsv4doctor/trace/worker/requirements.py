"""What SGLang's own metadata requires, by import name."""

import re

# Import names of distributions whose name does not say.
IMPORT_NAMES = {
    "apache-tvm-ffi": ("tvm_ffi",),
    "av": ("av",),
    "cuda-python": ("cuda",),
    "cuda-tile": ("cuda",),
    "decord2": ("decord",),
    "flash-attn-4": ("flash_attn",),
    "flashinfer-python": ("flashinfer",),
    "ipython": ("IPython",),
    "humming-kernels": ("humming",),
    "nvidia-cutlass-dsl": ("cutlass",),
    "nvidia-ml-py": ("pynvml",),
    "nvshmem4py-cu13": ("nvshmem",),
    "pillow": ("PIL",),
    "python-dateutil": ("dateutil",),
    "python-multipart": ("multipart",),
    "pyzmq": ("zmq",),
    "quack-kernels": ("quack",),
    "sgl-deep-ep": ("deep_ep",),
    "sgl-deep-gemm": ("deep_gemm",),
    "sgl-flash-mla": ("flash_mla",),
    "sglang-kernel": ("sgl_kernel",),
    "sgl-kernel": ("sgl_kernel",),
    "tilelang": ("tilelang", "tvm"),
}


def usual_packages():
    """Import names that every release requires, for a tree whose requirements cannot be read."""
    usual = {"deep_gemm", "torchao", "xgrammar", "compressed_tensors", "einops", "psutil", "orjson"}
    return usual.union(*IMPORT_NAMES.values())


def declared_packages(metadata_text):
    """Import name -> pinned version of what a METADATA text requires without extras.

    A package that is not pinned maps to the lowest version allowed, or None.
    """
    declared = {}
    for line in metadata_text.splitlines():
        if line.startswith("Requires-Dist:") and "extra ==" not in line:
            name, pin = name_and_pin(line)
            for root in IMPORT_NAMES.get(name, (name.replace("-", "_"),)):
                declared[root] = pin
    return declared


def name_and_pin(line):
    """("flashinfer-python", "0.6.12") of a Requires-Dist line; the pin is the lowest version."""
    requirement = line.split(":", 1)[1].split(";")[0].strip()
    name = re.split(r"[<>=!;\[ (~]", requirement)[0].lower().replace("_", "-")
    pin = re.search(r"[=~>]=\s*([0-9][0-9A-Za-z.]*)", requirement)
    return name, pin.group(1) if pin else None


def requirements_by_root(metadata_text):
    """Import name -> the requirement, without extras and markers, that brings it."""
    found = {}
    for line in metadata_text.splitlines():
        if line.startswith("Requires-Dist:") and "extra ==" not in line:
            requirement = line.split(":", 1)[1].split(";")[0].strip()
            name, _ = name_and_pin(line)
            for root in IMPORT_NAMES.get(name, (name.replace("-", "_"),)):
                found.setdefault(root, re.sub(r"\[.*?\]", "", requirement))
    return found
