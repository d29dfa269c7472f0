"""Which parts of SGLang and torch a trace leaves out.

A left-out module is a stand-in: it imports, and nothing of it runs.  Only what decides neither
arguments nor quant methods nor the MoE forward is listed.  A module that a flag of the launch
names is never left out (see `inert_for`).
"""

import importlib
import itertools
import os
import re

# Module prefix -> flags (their beginnings) that make it part of a launch's resolution.
_SGLANG = {
    "sglang.lang": (),  # the frontend language
    "sglang.srt.entrypoints": (),  # HTTP and gRPC servers
    "sglang.srt.multimodal": (),  # image and audio processors
    "sglang.srt.managers": (),  # scheduler, tokenizer and detokenizer processes
    "sglang.srt.disaggregation": ("--disaggregation",),
    "sglang.srt.grpc": ("--grpc",),
    "sglang.srt.tracing": (),
    "sglang.srt.observability": (),
    "sglang.srt.metrics": (),
    "sglang.srt.lora": ("--lora", "--enable-lora", "--max-lora"),
    "sglang.srt.eplb": ("--enable-eplb", "--eplb", "--init-expert-location"),
    "sglang.srt.weight_sync": (),
    "sglang.srt.debug_utils": (),
    "sglang.srt.session": (),
    "sglang.srt.ray": ("--ray", "--use-ray"),
    "sglang.srt.checkpoint_engine": (),
    "sglang.srt.elastic_ep": ("--elastic-ep",),
    "sglang.srt.multiplex": ("--enable-pdmux", "--pdmux"),
    "sglang.srt.rust_server": (),
    "sglang.srt.beam_search": ("--beam", "--enable-beam"),
    # Parsers that argparse takes its choices from.
    "sglang.srt.parser": ("--reasoning-parser",),
    "sglang.srt.function_call": ("--tool-call-parser",),
    "sglang.srt.constrained": ("--grammar-backend",),
}
_TORCH = (
    "torch._dynamo",  # the compiler stack: torch.compile is a pass-through in a trace
    "torch._inductor",
    "torch.export",
    "torch.distributions",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "sympy",  # symbolic sizes; see concrete_shapes
    "mpmath",
)
_HUGGING_FACE = (
    "transformers.loss.loss_utils",
    "transformers.masking_utils",
    "transformers.image_processing_utils",
    "transformers.image_utils",
    "transformers.modeling_gguf_pytorch_utils",
    "transformers.processing_utils",
    "transformers.quantizers.quantizer_torchao",
    "httpx",  # nothing is fetched in a trace
)


def inert_for(tree, arguments, whole=False):
    """A predicate on module names for launches with these arguments on the tree at `tree`.

    whole: leave out no part of SGLang's runtime or torch's compiler; slow, to check that leaving
    them out changes nothing.
    """
    prefixes = list(_HUGGING_FACE)
    if not whole:
        named = named_flags(arguments)
        prefixes += _TORCH
        prefixes += [
            prefix
            for prefix, flags in _SGLANG.items()
            if not any(_is_meant(name, flag) for flag in flags for name in named)
        ]
    dotted = tuple(prefix + "." for prefix in prefixes)
    configs = _other_models_configs(os.path.join(tree, "sglang", "srt", "configs"))

    def inert(name):
        return (
            name in configs
            or (name + ".").startswith(dotted)
            or _MODEL_CODE.match(name) is not None
        )

    return inert


def named_flags(arguments):
    """The flags among the arguments, and those in the --config files that they name."""
    flags = {argument.partition("=")[0] for argument in arguments if argument.startswith("--")}
    for before, argument in itertools.pairwise(arguments):
        if before == "--config":
            flags |= _keys(argument)
    return flags


def _keys(path):
    """What may be a key in a YAML file, as a flag; one too many only costs time."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            keys = re.findall(r"""([\w-]+)["']?\s*:""", file.read())
    except OSError:  # SGLang says what is wrong with it
        return set()
    return {"--" + key.replace("_", "-") for key in keys}


def _is_meant(name, flag):
    """True where `name` begins with `flag`, or is short for it: argparse takes any beginning."""
    return name.startswith(flag) or (len(name) > 2 and flag.startswith(name))


# Hugging Face's own model code, and SGLang's draft workers, of which only the name is needed.
_MODEL_CODE = re.compile(
    r"transformers\.models\.\w+\.(modeling|processing|image_processing|video_processing"
    r"|feature_extraction|tokenization)_|sglang\.srt\.speculative\.([\w.]+\.)?\w+_worker(_v\d+)?$"
)
_MODEL_CONFIG = re.compile(r"^class \w+\(\s*[\w.]*Config\b", re.MULTILINE)


def _other_models_configs(folder):
    """Module names of the files that define other models' Hugging Face configurations."""
    names = set()
    for entry in os.scandir(folder):
        if not entry.name.endswith(".py") or entry.name.startswith("deepseek_v4"):
            continue
        with open(entry.path, encoding="utf-8") as source:
            if _MODEL_CONFIG.search(source.read()):
                names.add("sglang.srt.configs." + entry.name[:-3])
    return names


def without_compiler():
    """torch.compile and its relatives as pass-throughs, so that they pull nothing in."""
    import importlib

    import torch
    import torch.compiler

    from . import concrete_shapes

    concrete_shapes.install()

    def unchanged(function=None, *args, **kwargs):
        return function if callable(function) else (lambda inner: inner)

    torch.compile = unchanged
    for name in ("disable", "allow_in_graph", "assume_constant_result"):
        setattr(torch.compiler, name, unchanged)
    torch.compiler.is_compiling = torch.compiler.is_dynamo_compiling = lambda: False
    dynamo = importlib.import_module("torch._dynamo")  # the stand-in
    for name in ("disable", "allow_in_graph", "skip", "run", "optimize", "graph_break"):
        setattr(dynamo, name, unchanged)


def scan_transformers_once():
    """transformers lists its models' files twice, under two spellings of the same folder."""
    import pathlib

    import transformers.utils.import_utils as import_utils

    scan = getattr(import_utils, "create_import_structure_from_path", None)
    if scan is None:
        return

    def scan_folder(path):
        path = pathlib.Path(path)
        return scan(path.parent if path.name == "__init__.py" else path)

    import_utils.create_import_structure_from_path = scan_folder


def without_other_models():
    """SGLang's model registry imports every model file; only DeepSeek-V4's are needed."""
    import pkgutil

    iterate = pkgutil.iter_modules
    models = "sglang.srt.models."

    def only_deepseek_v4(path=None, prefix=""):
        for module in iterate(path, prefix):
            if prefix != models or module.name.startswith(models + "deepseek_v4"):
                yield module

    pkgutil.iter_modules = only_deepseek_v4


def without_token_hashes():
    """DeepSeek-V4.1's engram layers hash tokens by a map over the whole vocabulary.

    That map is data, which a trace makes up, and tokenizers are left out: the module that holds it
    is built without it.
    """
    import sys

    engram = sys.modules.get("sglang.srt.layers.engram")
    hasher = getattr(engram, "EngramHasher", None)
    if hasher is not None:
        import torch

        hasher.__init__ = lambda self, *args, **kwargs: torch.nn.Module.__init__(self)


def keep_whole_bytecode_only():
    """Python 3.11 keeps a module that a full disk cut short, and fails on it ever after."""

    def write(path, data, mode=0o666):
        scratch = f"{path}.{os.getpid()}"
        handle = os.open(scratch, os.O_EXCL | os.O_CREAT | os.O_WRONLY, mode & 0o666)
        try:
            with open(handle, "wb", buffering=0) as file:
                if file.write(data) != len(data):
                    raise OSError("cut short")
            os.replace(scratch, path)
        except OSError:
            os.unlink(scratch)
            raise

    importlib._bootstrap_external._write_atomic = write
