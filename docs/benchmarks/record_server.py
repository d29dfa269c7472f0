"""Prediction against reality on a machine with a GPU: trace, serve, record, compare.

    python docs/benchmarks/record_server.py MODEL --out FOLDER -- --tp 1 --moe-runner-backend triton

Run it with the Python of an environment that serves SGLang (0.5.14 or newer) and has dsv4doctor
installed.  The server gets a few layers and made-up weights (`--load-format dummy`), so that one
GPU is enough and MODEL needs no more than its configuration, tokenizer and headers: what is
compared is dispatch, not output.  Without a tokenizer add --skip-tokenizer-init.  Leaves
predicted.json, recorded.json (one more for every further rank), server.log and diff.md in FOLDER;
ends with the exit code of `dsv4doctor diff`.  With --profile FOLDER/profile gets a torch-profiler
trace of a second prompt, for `dsv4doctor profile`.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

LAYERS = '{"num_hidden_layers": 4}'
PROMPT = list(range(100, 356))
"""Token ids, so that no tokenizer is needed; one page long."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--port", type=int, default=30999)
    parser.add_argument("--minutes", type=float, default=15, help="to wait for the server")
    parser.add_argument("--profile", action="store_true", help="a trace of a second prompt too")
    own, flags = _split(sys.argv[1:])
    options = parser.parse_args(own)
    options.out.mkdir(parents=True, exist_ok=True)
    given = [*flags, "--json-model-override-args", LAYERS]
    predicted, recorded = options.out / "predicted.json", options.out / "recorded.json"
    trace = ["trace", str(options.model), "--python", sys.executable, "--no-cache"]
    _doctor([*trace, "--format", "json", "-o", str(predicted), "--", *given])
    serve(options, given, recorded)
    compare = ["diff", str(predicted), str(recorded)]
    _doctor([*compare, "--format", "markdown", "-o", str(options.out / "diff.md")])
    return _doctor(compare)


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    if "--" not in arguments:
        return arguments, []
    cut = arguments.index("--")
    return arguments[:cut], arguments[cut + 1 :]


def _doctor(arguments: list[str]) -> int:
    return subprocess.run([sys.executable, "-m", "dsv4doctor", *arguments]).returncode


def serve(options: argparse.Namespace, flags: list[str], recorded: Path) -> None:
    """Start a server that records, let it answer one prompt, and stop it."""
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(options.model)]
    command += ["--load-format", "dummy", "--port", str(options.port), *flags]
    environment = {**os.environ, "DSV4DOCTOR_RECORD": str(recorded.absolute())}
    with (options.out / "server.log").open("wb") as log:
        server = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            if _answers(server, options):
                _generate(options.port)
                if options.profile:
                    folder = str((options.out / "profile").absolute())
                    body = {"output_dir": folder, "activities": ["CPU", "GPU"]}
                    _post(options.port, "start_profile", body)
                    _generate(options.port)
                    _post(options.port, "stop_profile", {})
        except OSError as error:  # recorded by then: the server died of the prompt
            print(f"the server did not answer: {error}", file=sys.stderr)
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGTERM)
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)


def _answers(server: subprocess.Popen[bytes], options: argparse.Namespace) -> bool:
    """True once it is healthy; False when it has ended, which may be what was predicted."""
    deadline = time.monotonic() + options.minutes * 60
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{options.port}/health", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            time.sleep(2)
    return False


def _generate(port: int) -> None:
    sampling = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    _post(port, "generate", {"input_ids": PROMPT, "sampling_params": sampling})


def _post(port: int, what: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/{what}",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    # A first prompt can wait for nvcc: SGLang compiles several modules at their first call.
    with urllib.request.urlopen(request, timeout=900) as answer:
        answer.read()


if __name__ == "__main__":
    sys.exit(main())
