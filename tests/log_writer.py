"""Realistic SGLang logs, worded after the log statements of the releases named."""

from __future__ import annotations

import random
from collections.abc import Iterator

ARGUMENTS_0514 = (
    "server_args=ServerArgs(model_path='/models/DeepSeek-V4-Flash-NVFP4', tokenizer_mode='auto', "
    "load_format='auto', trust_remote_code=True, context_length=131072, dtype='auto', "
    "quantization=None, kv_cache_dtype='fp8_e4m3', mem_fraction_static=0.86, tp_size=8, dp_size=1, "
    "ep_size=8, speculative_algorithm='EAGLE', speculative_num_steps=3, speculative_eagle_topk=1, "
    "speculative_num_draft_tokens=4, moe_runner_backend='triton', "
    "speculative_moe_runner_backend='triton', fp8_gemm_runner_backend='auto', "
    "json_model_override_args='{}', custom_sigquit_handler=None, log_requests_target=None, "
    "disable_cuda_graph=False, enable_request_time_stats_logging=False)"
)
ARGUMENTS_0523 = (
    "server_args={'model_path': 'deepseek-ai/DeepSeek-V4-Flash', 'load_format': 'auto', "
    "'trust_remote_code': True, 'context_length': None, 'quantization': None, "
    "'kv_cache_dtype': 'fp8_e4m3', 'tp_size': 4, 'ep_size': 4, 'moe_runner_backend': "
    "'flashinfer_mxfp4', 'speculative_algorithm': None, 'attention_backend': 'dsv4', "
    "'fp8_gemm_runner_backend': 'cutlass', 'cuda_graph_config': {'decode': {'bs': [1, 2, 4]}}, "
    "'mem_fraction_static': 0.85}"
)


def healthy(release: str, gpu: str = "NVIDIA RTX PRO 6000 Blackwell Server Edition") -> str:
    """A whole healthy start with some traffic, as `release` logs it."""
    arguments = ARGUMENTS_0514 if release < "0.5.19" else ARGUMENTS_0523
    lines = [
        "[2026-11-29 14:00:00] " + arguments,
        f"[2026-11-29 14:00:01] sglang version: {release}, device: {gpu}",
        "[2026-11-29 14:00:02] Using default HuggingFace chat template with detected content "
        "format: string",
        "[2026-11-29 14:00:09 TP0 EP0] Init torch distributed begin.",
        "box:77:77 [0] NCCL INFO ncclCommInitRank comm 0x55 rank 0 nranks 8 cudaDev 0 nvmlDev 0 "
        "busId 1000 commId 0x7 - Init COMPLETE",
        "[2026-11-29 14:00:19 TP0 EP0] Init torch distributed ends. elapsed=9.80 s, mem usage="
        "1.10 GB",
        "[2026-11-29 14:00:20 TP0 EP0] Load weight begin. avail mem=93.21 GB",
        "[2026-11-29 14:00:20 TP0 EP0] Ignore import error when loading sglang.srt.models.glm4v: "
        "cannot import name 'x' from 'transformers'",
        "Loading safetensors checkpoint shards:   0% Completed | 0/46 [00:00<?, ?it/s]\r"
        "Loading safetensors checkpoint shards: 100% Completed | 46/46 [00:58<00:00,  1.27s/it]",
        "[2026-11-29 14:01:30 TP0 EP0] Load weight end. elapsed=70.11 s, "
        "type=DeepseekV4ForCausalLM, avail mem=48.20 GB, mem usage=45.01 GB.",
        "[2026-11-29 14:01:31 TP0 EP0] Memory pool end. avail mem=9.18 GB",
        "[2026-11-29 14:01:32 TP0 EP0] Capture cuda graph begin. This can take up to several "
        "minutes. avail mem=9.01 GB",
        "[2026-11-29 14:02:32 TP0 EP0] Capture cuda graph end. Time elapsed: 60.02 s. mem usage="
        "1.51 GB. avail mem=7.50 GB.",
        "[2026-11-29 14:02:33 TP0 EP0] max_total_num_tokens=1179648, chunked_prefill_size=8192, "
        "max_prefill_tokens=16384, max_running_requests=256, context_len=131072, "
        "available_gpu_mem=7.50 GB",
        "/opt/lib/python3.12/site-packages/torch/_dynamo/eval_frame.py:929: UserWarning: no error",
        "[2026-11-29 14:02:34] INFO:     Uvicorn running on http://0.0.0.0:30000 (Press CTRL+C to "
        "quit)",
        "[2026-11-29 14:02:40] The server is fired up and ready to roll!",
        '[2026-11-29 14:02:41] INFO:     10.0.0.9:5 - "POST /v1/errors HTTP/1.1" 404 Not Found',
    ]
    return "\n".join((*lines, *traffic(200, seed=1))) + "\n"


def traffic(count: int, seed: int) -> Iterator[str]:
    """`count` lines of a serving SGLang."""
    draw = random.Random(seed)
    for number in range(count):
        stamp = f"[2026-11-29 14:{number // 600 % 60:02}:{number // 10 % 60:02}"
        kind = draw.random()
        if kind < 0.55:
            tokens = draw.randrange(900_000)
            yield (
                f"{stamp} TP0 EP0] Decode batch, #running-req: {draw.randrange(1, 64)}, "
                f"#full token: {tokens}, full token usage: {tokens / 1e6:.2f}, #swa token: "
                f"{tokens // 9}, swa token usage: 0.11, accept len: {draw.uniform(2, 3):.2f}, "
                f"accept rate: 0.71, cuda graph: True, gen throughput (token/s): "
                f"{draw.uniform(100, 2000):.2f}, #queue-req: 0, "
            )
        elif kind < 0.75:
            yield (
                f"{stamp} TP0 EP0] Prefill batch, #new-seq: 1, #new-token: {draw.randrange(8192)}, "
                f"#cached-token: {draw.randrange(4096)}, full token usage: 0.12, swa token usage: "
                f"0.03, #running-req: 3, #queue-req: 0, #pending-token: 0, cuda graph: False, "
                f"input throughput (token/s): {draw.uniform(1000, 20000):.2f}"
            )
        elif kind < 0.97:
            client = f"10.0.{draw.randrange(255)}.{draw.randrange(255)}:{draw.randrange(65535)}"
            yield f'{stamp}] INFO:     {client} - "POST /v1/chat/completions HTTP/1.1" 200 OK'
        else:
            yield f"{stamp}] Cache flushed successfully! request={draw.randrange(10**9):x}"
