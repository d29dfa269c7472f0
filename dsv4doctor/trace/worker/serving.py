"""SGLang's own entry points, in the order a server calls them.

Nothing here tests a version: what a release has is asked of its modules and signatures.
"""

import contextlib
import importlib
import inspect
import os

FIELDS = (
    "model_path",
    "quantization",
    "moe_runner_backend",
    "speculative_moe_runner_backend",
    "moe_a2a_backend",
    "speculative_moe_a2a_backend",
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "dsv4_attn_backend",
    "fp8_gemm_runner_backend",
    "fp4_gemm_runner_backend",
    "kv_cache_dtype",
    "page_size",
    "context_length",
    "tp_size",
    "ep_size",
    "pp_size",
    "dp_size",
    "enable_dp_attention",
    "disable_shared_experts_fusion",
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_draft_model_quantization",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "mem_fraction_static",
    "swa_full_tokens_ratio",
    "chunked_prefill_size",
    "disaggregation_mode",
    "nnodes",
    "base_gpu_id",
    "gpu_id_step",
    "numa_node",
    "disable_custom_all_reduce",
    "flashinfer_allreduce_fusion_backend",
    "enable_flashinfer_allreduce_fusion",
    "enable_nccl_nvls",
    "enable_symm_mem",
    "enable_torch_symm_mem",
    "enable_mscclpp",
)
"""The resolved arguments that a trace reports, where the release has them."""


def call(function, **available):
    """Call `function` with those of `available` that its signature names."""
    names = inspect.signature(function).parameters
    return function(**{name: value for name, value in available.items() if name in names})


def optional(module, attribute=None):
    """A module or its attribute; None where the release has neither."""
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and module.startswith(error.name):
            return None
        raise
    return loaded if attribute is None else getattr(loaded, attribute, None)


def parse_arguments(arguments):
    """SGLang's ServerArgs for a command line, resolved; `resolved` tells what came of it."""
    from sglang.srt.server_args import prepare_server_args

    server_args = prepare_server_args(arguments)
    if hasattr(server_args, "resolve_once"):
        server_args.resolve_once()
    return server_args


def argument_check(server_args):
    """SGLang's own check of them, None where a release has none.

    A server runs it when the arguments are resolved and not published yet; it may change some.
    """
    return getattr(server_args, "check_server_args", None)


def resolved(server_args):
    """What resolution decided; before 0.5.15's pipeline that is the record itself."""
    view = optional("sglang.srt.arg_groups.overrides", "resolved_view")
    return server_args if view is None else view(server_args)


def publish(server_args):
    """Make the arguments this process's configuration, as a scheduler process does."""
    context = optional("sglang.srt.runtime_context")
    if context is not None and hasattr(context, "publish"):
        ranks = {}
        if hasattr(context, "SpawnRanks"):
            ranks["ranks"] = context.SpawnRanks(world_rank=0, gpu_id=0)
        context.publish(server_args, role="scheduler", **ranks)
    else:
        from sglang.srt.server_args import set_global_server_args_for_scheduler

        set_global_server_args_for_scheduler(server_args)
    from sglang.srt.layers.moe.utils import initialize_moe_config

    call(initialize_moe_config, server_args=server_args)
    for module, name in (
        ("sglang.srt.layers.quantization.fp8_utils", "initialize_fp8_gemm_config"),
        ("sglang.srt.layers.quantization.fp4_utils", "initialize_fp4_gemm_config"),
    ):
        initialize = optional(module, name)
        if initialize is not None:
            call(initialize, server_args=server_args)


def form_groups(view):
    """SGLang's own parallel groups over torch's fake process group: no sockets, no peers."""
    import torch.distributed as dist
    from sglang.srt.distributed import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    world = view.tp_size * view.pp_size
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    new_group = dist.new_group

    def fake_group(ranks=None, timeout=None, backend=None, pg_options=None, **kwargs):
        return new_group(ranks, backend="fake")

    dist.new_group = fake_group
    coordinator = parallel_state.GroupCoordinator
    original = coordinator.__init__
    signature = inspect.signature(original)

    def without_communicators(self, *args, **kwargs):
        bound = signature.bind(self, *args, **kwargs)
        for name in signature.parameters:
            if name.startswith("use_"):
                bound.arguments[name] = False
        original(*bound.args, **bound.kwargs)

    coordinator.__init__ = without_communicators
    parallel_state.init_distributed_environment(
        backend="fake",
        world_size=world,
        rank=0,
        local_rank=0,
        distributed_init_method="env://",
    )
    attention_dp = view.dp_size if getattr(view, "enable_dp_attention", False) else 1
    call(
        parallel_state.initialize_model_parallel,
        backend="fake",
        tensor_model_parallel_size=view.tp_size,
        pipeline_model_parallel_size=view.pp_size,
        expert_model_parallel_size=getattr(view, "ep_size", 1),
        attention_data_parallel_size=attention_dp,
        attention_context_model_parallel_size=getattr(view, "attn_cp_size", 1) or 1,
        moe_data_model_parallel_size=getattr(view, "moe_dp_size", 1) or 1,
        decode_context_parallel_size=getattr(view, "dcp_size", 1) or 1,
    )


def model_config(server_args, view, draft):
    """SGLang's ModelConfig for the main model or the draft."""
    from sglang.srt.configs.model_config import ModelConfig

    path = view.model_path
    if draft:
        path = getattr(view, "speculative_draft_model_path", None) or path
    return call(
        ModelConfig.from_server_args,
        server_args=server_args,
        model_path=path,
        is_draft_model=draft,
    )


def prepare_layers(server_args, config):
    """What a worker sets up between its groups and its model."""
    from sglang.srt.layers.dp_attention import initialize_dp_attention

    call(initialize_dp_attention, server_args=server_args, model_config=config)
    _size_dp_buffers(resolved(server_args))
    initialize = optional("sglang.srt.distributed.bootstrap", "init_layer_runtime")
    if initialize is not None:
        call(initialize, model_config=config, server_args=server_args)


def _size_dp_buffers(view):
    """Data-parallel attention: what each forward says of its batch, here 8 tokens a rank."""
    tokens = 8
    size = optional("sglang.srt.layers.dp_attention", "set_dp_buffer_len")
    if size is None or not getattr(view, "enable_dp_attention", False):
        return
    call(
        size,
        global_dp_buffer_len=tokens * view.dp_size,
        local_dp_buffer_len=tokens,
        dp_max_padding=True,
        global_num_tokens=[tokens] * view.dp_size,
    )


def quant_config(config):
    """SGLang's quantization config object of a ModelConfig."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader import loader

    load_config = LoadConfig()
    return (
        call(loader._get_quantization_config, model_config=config, load_config=load_config),
        load_config,
    )


def build_model(config, load_config, quantization):
    """The real model class on meta tensors."""
    import torch
    from sglang.srt.model_loader import loader

    from .tensors import Redirect

    takes_quantization = len(inspect.signature(loader._initialize_model).parameters) >= 3
    extra = (quantization,) if takes_quantization else ()
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"), Redirect("meta"):
            return loader._initialize_model(config, load_config, *extra)
    finally:
        torch.set_default_dtype(default)


# ------------------------------------------------------------------------ draft context

_CONTEXTS = (
    "speculative_moe_backend_context",
    "speculative_moe_a2a_backend_context",
    "draft_model_build_scope",
)


def draft_worker_file(server_args, view):
    """The source file of the worker class that SGLang chooses for this speculative algorithm.

    The workers' modules are left out of the trace, so the class is a stand-in that knows its
    module's name.
    """
    import sglang
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    algorithm = SpeculativeAlgorithm.from_string(view.speculative_algorithm)
    worker = algorithm.create_worker(server_args)
    module = getattr(worker, "symbol", worker.__module__ + ".").rpartition(".")[0]
    root = os.path.dirname(os.path.dirname(sglang.__path__[0] + os.sep))
    return os.path.join(root, *module.split(".")) + ".py"


def draft_contexts(worker_file):
    """Names of SGLang's context managers around that worker's draft model, read from source.

    Not every worker switches to --speculative-moe-runner-backend: DSpark's runs its draft with
    the main model's backend.
    """
    names = _names_in_with(worker_file)
    shared = os.path.join(_speculative_folder(worker_file), "draft_worker_common.py")
    with open(worker_file, encoding="utf-8") as source:
        if "build_draft_tp_worker" in source.read() and os.path.exists(shared):
            names |= _names_in_with(shared)
    return [name for name in _CONTEXTS if name in names]


def _speculative_folder(path):
    while os.path.basename(path) != "speculative":
        path = os.path.dirname(path)
    return path


def _names_in_with(path):
    import ast

    with open(path, encoding="utf-8") as source:
        tree = ast.parse(source.read())
    return {
        part.id
        for node in ast.walk(tree)
        if isinstance(node, ast.With)
        for item in node.items
        for part in ast.walk(item.context_expr)
        if isinstance(part, ast.Name)
    }


@contextlib.contextmanager
def draft_scope(names):
    """Enter SGLang's own contexts for the draft."""
    from sglang.srt.layers.moe import utils

    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(getattr(utils, name)())
        yield
