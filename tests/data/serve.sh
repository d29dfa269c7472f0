#!/usr/bin/env bash
# How the team of the story served DeepSeek-V4-Flash-NVFP4 on RTX PRO 6000.
set -euo pipefail
export NCCL_P2P_LEVEL=SYS
export SGLANG_ENABLE_JIT_DEEPGEMM=0

exec numactl --cpunodebind=0 --membind=0 \
  python3 -m sglang.launch_server \
    --model-path @MODEL@ \
    --served-model-name deepseek-v4-flash \
    --tp 4 \
    --moe-runner-backend triton \
    --speculative-algorithm EAGLE \
    --speculative-num-steps 3 \
    --speculative-eagle-topk 1 \
    --speculative-num-draft-tokens 4 \
    --speculative-moe-runner-backend triton \
    --reasoning-parser deepseek-v4 \
    --tool-call-parser deepseekv4 \
    --host 0.0.0.0 --port 30000
