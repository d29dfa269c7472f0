"""Spoiled launch scripts, configurations, baselines and checkpoint configs: no traceback, an
answer within two seconds, and nothing opened but the files that were given.

    python tests/benchmarks/fuzz_inputs.py [COUNT] [SEED]

Exit code 1 and the seed of the first input that did not hold, else a line of figures.
"""

import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from dsv4doctor import baseline, checking, config
from dsv4doctor.errors import DoctorError
from dsv4doctor.facts.checkpoint import read_checkpoint
from dsv4doctor.launch import read_script

_LIMIT = 2.0
_WATCHED = ("open", "os.listdir", "os.scandir", "subprocess.Popen", "socket.connect")

_SCRIPT = b"""#!/bin/bash
set -euo pipefail
source env.sh
MODE=${1:-decode}
ARGS=(--tp 4 --context-length $((4 * 1024)))
pick() { local tp=$1; shift; echo "$tp" "$@"; }
case $MODE in prefill) ARGS+=(--page-size 64) ;; decode|all) ARGS+=(--x "a b") ;; *) exit 1 ;; esac
if [[ -n "${SPEC:-}" && $MODE != all ]]; then ARGS+=(--speculative-algorithm EAGLE); fi
for i in 0 1; do export CUDA_VISIBLE_DEVICES=$i; done
[ -f /etc/passwd ] && . /etc/passwd
exec numactl -N 0 env A=1 python -m sglang.launch_server --model-path "$MODEL" "${ARGS[@]}" \\
  --host $(hostname) 2>&1 | tee log
"""
_TOML = b"""arch = "sm_120"
baseline = "known.json"
[[target]]
name = "production"
launch = ["serve.sh:12", "b.sh"]
env = { A = "1" }
[[suppress]]
rule = "DSV103"
subject = "model.*"
target = "production"
reason = "a lab box"
expires = 2027-03-31
"""
_BASELINE = b"""{"schema": "dsv4doctor-baseline/1", "findings": [{"target": null, "rule": "DSV101",
"subject": "x", "severity": "error", "fingerprint": "00"}]}"""
_CONFIG = b"""{"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4",
"num_hidden_layers": 2, "num_nextn_predict_layers": 1, "n_routed_experts": 2,
"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128],
"modules_to_not_convert": ["re:.*head", "model.norm*"], "config_groups": {"group_0": {"targets":
["re:.*experts"], "weights": {"num_bits": 4, "type": "float", "group_size": 16}}}}}"""
_INDEX = b"""{"metadata": {"total_size": 1}, "weight_map":
{"layers.0.ffn.experts.0.w1.weight": "model-00001-of-00001.safetensors"}}"""
_HEADER = b"""{"layers.0.ffn.experts.0.w1.weight": {"dtype": "U8", "shape": [16, 8],
"data_offsets": [0, 128]}}"""

_TOKENS = [
    *(b"[", b"]", b"{", b"}", b'"', b"'", b"=", b"\n", b"\\", b",", b"#", b"\0", b"\xff", b"\xc3"),
    *(b"null", b"-1", b"1e999", b"NaN", b"[]", b"{}", b"9" * 5000, b"A" * 5000, b"\\ud800"),
    *(b"[" * 3000, b'{"a":' * 1500, b"../../../etc/passwd", b"/etc/passwd", b"re:(a*)*b"),
    *(b"$(", b")", b"${", b"`", b"$((", b"case $A in\n", b"x) ", b" ;;\n", b"esac\n", b"done\n"),
    *(b"for i in 1 2; do\n", b"if [ $A ]; then\n", b"fi\n", b"f() {\n", b"}\n", b"eval ", b"&&"),
    *(b"source /etc/passwd\n", b". ../../etc/hosts\n", b"A=$A$A\n", b'"${A[@]}"', b"<<E\n", b"E\n"),
    *(b"(" * 500, b"bash -c '", b"--config /etc/passwd ", b"sglang serve ", b"export A="),
]


def _spoiled(draw: random.Random, text: bytes) -> bytes:
    data = bytearray(text)
    for _ in range(draw.choice((1, 1, 1, 1, 2, 8))):
        way, at = draw.random(), draw.randrange(len(data) + 1)
        if way < 0.2:
            del data[at : at + draw.randint(1, 40)]
        elif way < 0.6:
            data[at:at] = draw.choice(_TOKENS)
        elif way < 0.7:
            data[at : at + 1] = bytes([draw.randrange(256)])
        elif way < 0.85:
            start = draw.randrange(len(data) + 1)
            data[at:at] = data[start : start + draw.randint(1, 200)]
        else:
            data[at:at] = data[at : at + 40] * draw.randint(1, 50)
    return bytes(data)


def _inputs(draw: random.Random, folder: Path) -> Iterator[Callable[[], object]]:
    """Writes the next files into `folder`, and yields who reads them."""
    script, toml, known = folder / "serve.sh", folder / "dsv4doctor.toml", folder / "known.json"
    script.write_bytes(_spoiled(draw, _SCRIPT))
    yield lambda: read_script(script, {"HOME": "/home/me", "MODEL": "/m"}, draw.choice((None, 14)))
    toml.write_bytes(_spoiled(draw, _TOML))
    yield lambda: checking.plan({}, (), config.read(toml))
    known.write_bytes(_spoiled(draw, _BASELINE))
    yield lambda: baseline.read(known)
    model = folder / "model"
    model.mkdir(exist_ok=True)
    which = draw.randrange(3)
    parts = [_CONFIG, _INDEX, _HEADER]
    parts[which] = _spoiled(draw, parts[which])
    (model / "config.json").write_bytes(parts[0])
    (model / "model.safetensors.index.json").write_bytes(parts[1])
    shard = len(parts[2]).to_bytes(8, "little") + parts[2] + bytes(128)
    (model / "model-00001-of-00001.safetensors").write_bytes(shard)
    yield lambda: read_checkpoint(model)


class _Watch:
    """What is opened, listed or started while it is on."""

    def __init__(self, allowed: Path) -> None:
        self.on = False
        self.seen: set[str] = set()
        # Python's own modules and their sources are opened by Python itself.
        self.allowed = (str(allowed), sys.prefix, sys.base_prefix)
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.on and event in _WATCHED:
            name = arguments[0]
            text = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
            if not text.startswith(self.allowed) and not text.endswith((".py", ".pyc")):
                self.seen.add(f"{event} {text[:200]}")


def main(count: int, seed: int) -> int:
    slowest, refused = 0.0, 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        watch = _Watch(folder)
        for number in range(count):
            draw = random.Random(f"{seed}/{number}")
            for read in _inputs(draw, folder):
                started = time.perf_counter()
                watch.on = True
                try:
                    read()
                except DoctorError:
                    refused += 1
                finally:
                    watch.on = False
                took = time.perf_counter() - started
                slowest = max(slowest, took)
                if took > _LIMIT or watch.seen:
                    print(f"seed {seed}/{number}: {took:.1f} s, {sorted(watch.seen)}")
                    return 1
    print(f"{4 * count} inputs, {refused} refused, the slowest {slowest:.2f} s")
    return 0


if __name__ == "__main__":
    given = [int(word) for word in sys.argv[1:3]]
    sys.exit(main(given[0] if given else 1000, given[1] if len(given) > 1 else 1))
