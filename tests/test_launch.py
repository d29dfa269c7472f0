"""Launch scripts as people write them, and input that is none."""

import contextlib
import os
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsv4doctor.errors import UsageError
from dsv4doctor.launch import from_arguments, read_script
from dsv4doctor.models import Launch

BASE = {"HOME": "/home/me", "MODELS": "/srv/models"}
SERVER = "python -m sglang.launch_server"


def read(folder: Path, text: str, line: int | None = None) -> Launch:
    script = folder / "serve.sh"
    script.write_bytes(text.encode())
    return read_script(script, BASE, line)


# name -> (script, model, flags)
SPELLINGS = {
    "python": (f"{SERVER} --model-path /m --tp 4", "/m", ["--tp", "4"]),
    "equals": (f"{SERVER} --tp=4 --model-path=/m", "/m", ["--tp=4"]),
    "model": (f"{SERVER} --model org/name --tp 4", "org/name", ["--tp", "4"]),
    "last model counts": (f"{SERVER} --model-path /a --model-path /b", "/b", []),
    "python options": ("python3.12 -u -X dev -m sglang.launch_server --model /m", "/m", []),
    "serve": ("sglang serve /m --tp 4", "/m", ["--tp", "4"]),
    "serve with flag": ("sglang serve --tp 4 --model-path /m", "/m", ["--tp", "4"]),
    "serve, model type": ("sglang serve /m --model-type llm --tp 4", "/m", ["--tp", "4"]),
    "cli module": ("python -m sglang.cli.main serve /m", "/m", []),
    "file": ("python /opt/sglang/python/sglang/launch_server.py --model /m", "/m", []),
    "continuation": (f"{SERVER} \\\n  --model-path /m \\\n  --tp 4 \\\n", "/m", ["--tp", "4"]),
    "windows line ends": (
        f"{SERVER} \\\r\n  --model-path /m \\\r\n --tp 4\r\n",
        "/m",
        ["--tp", "4"],
    ),
    "byte order mark": (f"\ufeff{SERVER} --model /m", "/m", []),
    "comment after": (f"{SERVER} --model /m # --tp 4", "/m", []),
    "hash inside": (f"{SERVER} --model /m#1 --tp 4", "/m#1", ["--tp", "4"]),
    "comment ends a continuation": (f"{SERVER} --model /m \\\n # --tp 4\n", "/m", []),
    "background": (f"{SERVER} --model /m --tp 4 &\nwait", "/m", ["--tp", "4"]),
    "tee": (f"{SERVER} --model /m --tp 4 2>&1 | tee log.txt", "/m", ["--tp", "4"]),
    "redirections": (
        f"{SERVER} --model /m >>a.log 2>b.log --tp 4 < /dev/null",
        "/m",
        ["--tp", "4"],
    ),
    "both streams": (f"{SERVER} --model /m --tp 4 &> serve.log &", "/m", ["--tp", "4"]),
    "process substitution": (
        f"{SERVER} --model /m --tp 4 > >(tee a) 2> >(tee b)",
        "/m",
        ["--tp", "4"],
    ),
    "single quotes": (
        f"""{SERVER} --model '/a $b' --x '{{"k": 1}}'""",
        "/a $b",
        ["--x", '{"k": 1}'],
    ),
    "double quotes": (f'{SERVER} --model "/a b" --x "{{\\"k\\": 1}}"', "/a b", ["--x", '{"k": 1}']),
    "glued quotes": (f"{SERVER} --model=/a\" b\"'c' --x a\\ b", "/a bc", ["--x", "a b"]),
    "ansi-c quotes": (f"{SERVER} --model /m --x $'a\\tb'", "/m", ["--x", "a\tb"]),
    "empty argument": (f'{SERVER} --model /m --x ""', "/m", ["--x", ""]),
    "variable": (f"MODEL=/m\nTP=4\n{SERVER} --model $MODEL --tp ${{TP}}", "/m", ["--tp", "4"]),
    "around the script": (f"{SERVER} --model $MODELS/x", "/srv/models/x", []),
    "default": (f"{SERVER} --model ${{M:-/m}} --tp ${{TP:-4}}", "/m", ["--tp", "4"]),
    "default unused": (f"M=/n; {SERVER} --model ${{M:-/m}}", "/n", []),
    "default in default": (f'{SERVER} --model "${{M:-${{N:-/m n}}}}"', "/m n", []),
    "assigning default": (f": ${{M:=/m}}\n{SERVER} --model $M", "/m", []),
    "alternative": (f"T=1\n{SERVER} --model /m ${{T:+--tp 4}} ${{U:+--no}}", "/m", ["--tp", "4"]),
    "splitting": (f'A="--tp 4  --x"\n{SERVER} --model /m $A', "/m", ["--tp", "4", "--x"]),
    "no splitting": (f'A="--tp 4"\n{SERVER} --model /m "$A"', "/m", ["--tp 4"]),
    "appending": (f'A="--tp 4"\nA+=" --x"\n{SERVER} --model /m $A', "/m", ["--tp", "4", "--x"]),
    "array": (
        f'ARGS=(\n --model /m\n # more\n --tp 4 "a b"\n)\nARGS+=(--x)\n{SERVER} "${{ARGS[@]}}"',
        "/m",
        ["--tp", "4", "a b", "--x"],
    ),
    "empty array": (f'A=()\n{SERVER} --model /m "${{A[@]}}" --tp 4', "/m", ["--tp", "4"]),
    "guarded array": (f'A=(--x)\n{SERVER} --model /m ${{A[@]+"${{A[@]}}"}}', "/m", ["--x"]),
    "element": (f"A=(/l /m)\n{SERVER} --model ${{A[1]}}", "/m", []),
    "command in an array": (f'CMD=({SERVER} --model /m)\nexec "${{CMD[@]}}"', "/m", []),
    "command in a string": (
        f'CMD="{SERVER} --model /m"\nCMD="$CMD --tp 4"\neval $CMD',
        "/m",
        ["--tp", "4"],
    ),
    "tilde": (f"{SERVER} --model ~/m", "/home/me/m", []),
    "here-document": (f"cat > x <<'EOF'\n{SERVER} --model /no\nEOF\n{SERVER} --model /m", "/m", []),
    "echo": (
        f'echo {SERVER} --model /no\necho "{SERVER} --model /no"\n{SERVER} --model /m',
        "/m",
        [],
    ),
    "pkill": (f'pkill -f "{SERVER}" || true\n{SERVER} --model /m', "/m", []),
    "subshell": (f"(cd /x && {SERVER} --model /m)", "/m", []),
    "after and": (f"source /v/bin/activate && {SERVER} --model /m", "/m", []),
    "function": (f'launch() {{\n  {SERVER} --model /m "$@"\n}}\nlaunch', "/m", []),
    "case": (
        f"M=a\ncase $M in\n a) TP=2 ;;\n *) TP=4 ;;\nesac\n{SERVER} --model /m --tp $TP",
        "/m",
        ["--tp", "2"],
    ),
    "case, on one line": (
        f'case "${{M:-b}}" in (a|c) TP=1;; b*) TP=2;; *) TP=4; esac; {SERVER} --model /m --tp $TP',
        "/m",
        ["--tp", "2"],
    ),
    "case that falls through": (
        f"case a in a) A=1 ;& b) B=2 ;; c) C=3 ;; esac\n{SERVER} --model /m $A $C",
        "/m",
        ["1"],
    ),
    "case where the arms agree": (
        f"case $1 in a) TP=4 ;; *) TP=4 ;; esac\n{SERVER} --model /m --tp $TP",
        "/m",
        ["--tp", "4"],
    ),
    "arguments of a function": (
        f'run() {{ local m=$1; shift; {SERVER} --model $m --n $# "$@"; }}\nrun /m --tp "4 5"',
        "/m",
        ["--n", "2", "--tp", "4 5"],
    ),
    "function that sets variables": (
        f"function pick {{\n TP=4\n}}\nTP=2\npick\n{SERVER} --model /m --tp $TP",
        "/m",
        ["--tp", "4"],
    ),
    "function that is not called": (
        f"other() {{ TP=8; }}\nTP=2\n{SERVER} --model /m --tp $TP",
        "/m",
        ["--tp", "2"],
    ),
    "function behind a trap": (f'start() {{\n{SERVER} --model /m\n}}\n"$@"', "/m", []),
    "arithmetic": (
        f"N=2\n{SERVER} --model /m --tp $((N * 2)) --x $((-7 / 2)) --y $(( (1+2)*3 % 5 ))",
        "/m",
        ["--tp", "4", "--x", "-3", "--y", "4"],
    ),
    "and, or": (
        f'T=1; [ -n "$T" ] && A=1 || A=2; [ -z "$T" ] && B=1; {SERVER} --model /m $A $B',
        "/m",
        ["1"],
    ),
    "a group behind or": (
        f'[ -n "$HOME" ] || {{ TP=1; exit 1; }}\n{SERVER} --model /m ${{TP+x}}',
        "/m",
        [],
    ),
    "its own arguments in a loop": (
        f"TP=4\nwhile [[ $# -gt 0 ]]; do case $1 in --tp) TP=$2; shift 2;; esac; done\n"
        f"{SERVER} --model /m --tp $TP",
        "/m",
        ["--tp", "4"],
    ),
    "if": (f"if [[ $HOME == /* && -f x ]]; then\n{SERVER} --model /m\nfi", "/m", []),
    "loop": (f"for i in 1 2; do\n  {SERVER} --model /m\ndone", "/m", []),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings_of_one_command(name: str, tmp_path: Path) -> None:
    text, model, flags = SPELLINGS[name]
    launch = read(tmp_path, f"#!/bin/bash\nset -euo pipefail\n{text}\n")
    assert (launch.model, list(launch.flags)) == (model, flags)


# What stands in front -> (wrappers, environment)
FRONTS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "exec": (("exec",), {}),
    "nohup": (("nohup",), {}),
    "A=1 CUDA_VISIBLE_DEVICES=0,1 exec": (("exec",), {"A": "1", "CUDA_VISIBLE_DEVICES": "0,1"}),
    "env A=1 B='x y'": (("env",), {"A": "1", "B": "x y"}),
    "A=0 env -u A B=1": (("env",), {"B": "1"}),
    "export A=1; nice -n 5": (("nice",), {"A": "1"}),
    "export A; A=1;": ((), {"A": "1"}),
    "declare -x A=1;": ((), {"A": "1"}),
    "set -a; A=1; set +a; B=2;": ((), {"A": "1"}),
    "export A=1 B=2; unset A;": ((), {"B": "2"}),
    "MODELS=/other;": ((), {"MODELS": "/other"}),
    "A=1;": ((), {}),
    "numactl --cpunodebind=0 --membind 0": (("numactl",), {}),
    "taskset -c 0-31": (("taskset",), {}),
    "timeout -s INT 3600 stdbuf -oL": (("timeout", "stdbuf"), {}),
    "sudo -E A=1 numactl -N 0": (("sudo", "numactl"), {"A": "1"}),
    "srun --export=ALL,A=1 -N 1": (("srun",), {"A": "1"}),
    "uv run": (("uv",), {}),
    "./wrap.sh": (("wrap.sh",), {}),
}


@pytest.mark.parametrize("front", FRONTS)
def test_what_stands_in_front(front: str, tmp_path: Path) -> None:
    launch = read(tmp_path, f"{front} {SERVER} --model-path /m --tp 4\n")
    wrappers, environment = FRONTS[front]
    assert (launch.model, launch.flags) == ("/m", ("--tp", "4"))
    assert (launch.wrappers, launch.environment) == (wrappers, environment)


DOCKER = """\
export SGLANG_OUTSIDE=1 TOKEN=t
docker run --rm --gpus all --shm-size 32g -p 30000:30000 \\
    -v /data/models:/models -v ~/.cache:/cache \\
    -e A=1 --env B=2 --env=C=3 -e TOKEN \\
    lmsysorg/sglang:latest """


@pytest.mark.parametrize(
    "inner",
    [f"{SERVER} --model /models/v4 --tp 4", f"bash -c '{SERVER} --model /models/v4 --tp 4'"],
)
def test_a_container_sees_its_own_variables_and_folders(inner: str, tmp_path: Path) -> None:
    launch = read(tmp_path, DOCKER + inner)
    assert launch.environment == {"A": "1", "B": "2", "C": "3", "TOKEN": "t"}
    assert launch.model == "/data/models/v4"
    assert launch.interpreter is None
    assert launch.wrappers[0] == "docker"
    assert any("SGLANG_OUTSIDE" in note for note in launch.notes)


@pytest.mark.parametrize(
    ("text", "interpreter"),
    [
        (f"{SERVER} --model /m", None),
        ("/opt/v/bin/python -m sglang.launch_server --model /m", "/opt/v/bin/python"),
        ("/opt/v/bin/sglang serve /m", "/opt/v/bin/python"),
        ("P=/opt/v/bin/python3\nexec $P -m sglang.launch_server --model /m", "/opt/v/bin/python3"),
        (f"source /opt/v/bin/activate\n{SERVER} --model /m", "/opt/v/bin/python"),
        ("torchrun --nproc-per-node 1 -m sglang.launch_server --model /m", None),
    ],
)
def test_interpreter(text: str, interpreter: str | None, tmp_path: Path) -> None:
    assert read(tmp_path, text).interpreter == interpreter


def test_shell_inside_a_shell_sees_exports_only(tmp_path: Path) -> None:
    text = f'export A=1\nB=2\nbash -lc \'C=3 {SERVER} --model /m --x "$A" --y "$B"\''
    launch = read(tmp_path, text)
    assert launch.flags == ("--x", "1", "--y", "")
    assert launch.environment == {"A": "1", "C": "3"}
    assert launch.wrappers == ("bash",)


def test_what_cannot_be_known_is_noted(tmp_path: Path) -> None:
    text = f'{SERVER} --model "$1" --tp $(nproc) $EXTRA --x "$UNSET"\n'
    launch = read(tmp_path, text)
    assert launch.model is None
    assert launch.flags == ("--tp", "$(nproc)", "--x", "")
    for name in ("$1", "$(nproc)", "$EXTRA", "$UNSET"):
        assert any(name in note and "line 1" in note for note in launch.notes), name
    assert launch.unknown == (
        "cannot know $(nproc), the value of --tp "
        "(line 1: $(nproc) is known only when the script runs)",
        "cannot know the text, the value of --x (line 1: $UNSET is not set here)",
    )


# script -> what is said of the value of --tp
UNKNOWN = {
    "TP=$(nproc)\n": "line 1: $(nproc) is known only when the script runs",
    "for TP in 1 2; do :; done\n": "line 1: a loop sets $TP",
    "TP=4\nfor i in 1 2; do TP=$((TP + i)); done\n": "line 2: cannot know this loop",
    "case $1 in a) TP=2 ;; *) TP=4 ;; esac\n": "line 1: cannot know the word of this case",
    "if [ -f /x ]; then TP=2; else TP=4; fi\n": "line 1: cannot know this condition",
    "TP=4\ngrep -q x /y && TP=8\n": "line 2: cannot know whether this runs",
    "read -r TP < /x\n": "line 1: read sets $TP",
    'f() { TP=$1; }\nf "$(nproc)"\n': "line 2: $(nproc) is known only when the script runs",
}


@pytest.mark.parametrize("text", UNKNOWN)
def test_a_value_that_cannot_be_known_can_be_given(text: str, tmp_path: Path) -> None:
    script = tmp_path / "serve.sh"
    script.write_text(f"{text}{SERVER} --model /m --tp $TP --ep 2\n")
    assert read_script(script, BASE).unknown == (
        f"cannot know $TP, the value of --tp ({UNKNOWN[text]})",
    )
    given = read_script(script, {**BASE, "TP": "4"}, given={"TP": "4"})
    assert (given.flags, given.unknown) == (("--tp", "4", "--ep", "2"), ())


def test_a_value_without_a_say_is_left_out(tmp_path: Path) -> None:
    text = f'A=(--host $(hostname) --tp 4)\n{SERVER} --model /m --port=$((P + $1)) "${{A[@]}}"'
    launch = read(tmp_path, text)
    assert (launch.flags, launch.unknown) == (("--tp", "4"), ())
    why = "line 1: $(hostname) is known only when the script runs"
    assert f"line 2: --host was left out ({why})" in launch.notes
    assert sum("$(hostname)" in note for note in launch.notes) == 1


def test_an_arm_sees_its_own_values(tmp_path: Path) -> None:
    arms = "".join(
        f' {mode}) A=(--x {mode}) && {SERVER} --model /{mode} "${{A[@]}}" ;;\n'
        for mode in ("prefill", "decode")
    )
    launch = read(tmp_path, f"A=(--none)\ncase $1 in\n{arms}esac\n", line=4)
    assert (launch.model, launch.flags, launch.unknown) == ("/decode", ("--x", "decode"), ())


def test_a_flag_that_only_one_arm_adds(tmp_path: Path) -> None:
    text = f'A=(--tp 4)\nif [ -f x ]; then A+=(--trust-remote-code); fi\n{SERVER} "${{A[@]}}"'
    assert read(tmp_path, text).unknown == (
        "cannot know whether --trust-remote-code is given (line 2: cannot know this condition)",
    )


def test_a_model_below_an_unset_folder_is_not_guessed(tmp_path: Path) -> None:
    assert read(tmp_path, f"{SERVER} --model $NOWHERE/v4").model is None


# condition -> which of the two arms are read
CONDITIONS = {
    '[[ "${SPEC:-1}" == "1" ]]': "first",
    "[ -z $SPEC ]": "first",
    '[ -n "$SPEC" ]': "second",
    "[[ ! -n $SPEC ]]": "first",
    '! [ -n "$SPEC" ]': "first",
    "test ${TP:-8} -gt 4": "first",
    "[ ${TP:-8} -le 4 ]": "second",
    "[ $HOME != /home/me ]": "second",
    "false; then A=(--third); elif true": "first",
    "true; then A=(--first); elif true": "elif",
    "[ -f /etc/x ]": "both",
    "[[ $HOME == /home/* ]]": "first",
    '[[ $HOME == "/home/*" ]]': "second",
    "[[ -z $SPEC && -z $HOME ]]": "second",
    "[[ -z $SPEC || -f /x ]]": "first",
    "[ -z $SPEC ] && [ -z $HOME ]": "second",
    "[ -f x ] && [ -z $SPEC ]": "both",
    "nvidia-smi | grep -q 6000": "both",
    '[ "$1" = spec ]': "both",
}


@pytest.mark.parametrize("condition", CONDITIONS)
def test_arms_that_cannot_run_are_left_out(condition: str, tmp_path: Path) -> None:
    arms = "A=(--first)\nB=1\nelse\nif true; then C=1; fi\nA=(--second)\nfi\n"
    text = f'if {condition}; then\n{arms}{SERVER} --model /m "${{A[@]}}" $B ${{C+c}}'
    launch = read(tmp_path, text)
    expected = {
        "first": ("--first", "1"),
        "elif": ("--first",),
        "second": ("--second", "c"),
        "both": ("$A", "$B", "c"),
    }
    assert launch.flags == expected[CONDITIONS[condition]]
    is_known = CONDITIONS[condition] != "both"
    assert any("cannot know this condition" in note for note in launch.notes) is not is_known
    assert (launch.unknown == ()) is is_known


def test_defaults_of_the_script_s_own_arguments(tmp_path: Path) -> None:
    launch = read(tmp_path, f"TP=${{1:-4}}\n{SERVER} --model /m --tp $TP")
    assert launch.flags == ("--tp", "4")
    assert any("$1 is taken as not given" in note for note in launch.notes)


def test_another_round_of_a_loop_may_have_set_a_value(tmp_path: Path) -> None:
    body = f'{SERVER} --model /m --tp $TP --x "$X"; TP=8; change'
    text = f"change() {{ X=2; }}\nTP=4\nX=1\nwhile true; do\n{body}\ndone"
    said = read(tmp_path, text).unknown
    assert said == (
        "cannot know $TP, the value of --tp (line 4: a loop sets $TP)",
        "cannot know $X, the value of --x (line 4: a loop sets $X)",
    )


def test_a_loop_is_read_once(tmp_path: Path) -> None:
    launch = read(tmp_path, f"\nwhile true; do\n TP=4\n{SERVER} --model /m --tp $TP\ndone")
    assert (launch.line, launch.flags) == (4, ("--tp", "4"))


def test_source_in_the_same_folder_is_followed_once(tmp_path: Path) -> None:
    (tmp_path / "env.sh").write_text("export A=1\nMODEL=/m\nsource serve.sh\nsource env.sh\n")
    here = '$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)'
    text = f'D="{here}"\nsource "$D/env.sh"\n. /elsewhere/x.sh\n{SERVER} --model $MODEL'
    launch = read(tmp_path, text, line=4)
    assert (launch.model, launch.environment) == ("/m", {"A": "1"})
    assert any("/elsewhere/x.sh" in note for note in launch.notes)


def test_a_chain_of_sourced_files_ends(tmp_path: Path) -> None:
    for index in range(40):
        (tmp_path / f"{index}.sh").write_text(f"export A{index}=1\nsource {index + 1}.sh\n")
    launch = read(tmp_path, f"source 0.sh\n{SERVER} --model /m")
    assert 5 < len(launch.environment) < 40
    assert any("too many" in note for note in launch.notes)


def test_notes_are_bounded(tmp_path: Path) -> None:
    launch = read(tmp_path, f"{SERVER} --model /m " + " ".join(f"$x{i}" for i in range(999)))
    assert len(launch.notes) == 41
    assert launch.notes[-1] == "and 959 more of this kind"


def test_several_commands(tmp_path: Path) -> None:
    text = f"{SERVER} --model /a\n\n{SERVER} \\\n --model /b\n"
    with pytest.raises(UsageError, match="2 SGLang commands") as caught:
        read(tmp_path, text)
    assert "1, 3" in (caught.value.hint or "")
    assert read(tmp_path, text, line=4).model == "/b"
    with pytest.raises(UsageError, match="no SGLang command on this line"):
        read(tmp_path, text, line=2)


BAD_SCRIPTS = {
    "an arm that does not run": (
        f"\nif [ -n $SPEC ]; then\n{SERVER} --model /m\nfi\n".encode(),
        "serve.sh:3: this SGLang command would not run",
    ),
    "empty": (b"", "empty"),
    "blank": (b" \n\n", "empty"),
    "binary": (b"\x7fELF\0\0\0", "binary"),
    "latin-1": (b"# caf\xe9\n", "UTF-8"),
    "large": (b"#" * (1 << 17) + b"\n", "128 KiB"),
    "no command": (b"echo hello\n", "no SGLang command"),
    "vllm": (b"\nexec vllm serve org/model --tp 4\n", "line 2 starts vLLM"),
    "trt": (b"trtllm-serve org/model\n", "TensorRT-LLM"),
    "single quote": (b"A='x\n" + SERVER.encode(), r":1: a ' is never closed"),
    "double quote": (b'\nA="x\n', r':2: a " is never closed'),
    "array": (b"A=(x\n", "never closed"),
    "brace": (b"A=${x\n", "never closed"),
    "substitution": (b"A=$(x\n", "never closed"),
    "bomb": (b"A=aaaa\n" + b"A=$A$A\n" * 60 + SERVER.encode(), "more than a megabyte"),
    "array bomb": (b"A=(a)\n" + b'A=("${A[@]}" "${A[@]}")\n' * 60, "more than a megabyte"),
    "many large words": (
        b"A=" + b"a" * 50_000 + b"\n" + b"x $A\n" * 10_000,
        "more than a megabyte",
    ),
    "deep substitution": (b"A=" + b"$(" * 5000 + b")" * 5000, "nested too deeply"),
    "deep default": (b"A=" + b"${A:-" * 100 + b"}" * 100, "nested too deeply"),
}


@pytest.mark.parametrize("name", BAD_SCRIPTS)
def test_bad_scripts(name: str, tmp_path: Path) -> None:
    content, message = BAD_SCRIPTS[name]
    path = tmp_path / "serve.sh"
    path.write_bytes(content)
    started = time.process_time()
    with pytest.raises(UsageError, match=message) as caught:
        read_script(path, BASE)
    assert "serve.sh" in caught.value.message
    assert caught.value.hint
    assert time.process_time() - started < 5


def test_paths_that_are_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for name, message in (("missing", "No such file"), ("fifo", "not a regular"), ("", "folder")):
        with pytest.raises(UsageError, match=message):
            read_script(tmp_path / name, {})
    with pytest.raises(UsageError):
        read_script(Path("a\0b"), {})


@pytest.mark.parametrize(
    "unit",
    [
        "(",
        "$(",
        "${",
        '"',
        "`",
        "A=(",
        "<",
        "<<A\n",
        "'",
        "\\",
        "&",
        "if ",
        "if true; then\n",
        "[ ! ",
        "A=$A$A\n",
        "$'",
        "{ ",
        "case x in x) ",
        "[[ ",
        "x && ",
        "f() {\n",
        "f() { f; f; }\nf\n",
        "A=(${A[@]} $(x))\n",
        "if x; then A+=(b); fi\n",
    ],
)
def test_a_long_script_of_anything_ends_soon(unit: str, tmp_path: Path) -> None:
    path = tmp_path / "serve.sh"
    path.write_text(unit * ((1 << 17) // len(unit)))
    started = time.process_time()
    with pytest.raises(UsageError):
        read_script(path, {})
    assert time.process_time() - started < 10


_TOKENS = st.sampled_from(
    [
        *"()[]{}'\"$`\\|&;<>#=+-@*? \n\t~ab1",
        "$(",
        "${",
        "A=",
        "A+=(",
        ":-",
        "<<E\n",
        "E\n",
        "$A",
        "[@]",
        "if ",
        "then ",
        "fi\n",
        "for A in ",
        "case ",
        "case $A in ",
        "a) ",
        ";; ",
        "esac\n",
        "f() { ",
        "}\n",
        "f ",
        "&& ",
        "$((",
        "[[ ",
        "]] ",
        "export ",
        "eval ",
        "source ",
        "unset ",
        "bash -c ",
        "docker run -e ",
        "env ",
        "python -m sglang.launch_server ",
        "--model ",
        "sglang serve ",
    ]
)


@settings(max_examples=600, deadline=2000, suppress_health_check=list(HealthCheck))
@given(st.lists(_TOKENS, max_size=60).map("".join))
def test_any_text_gives_a_launch_or_one_error(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.sh"
    path.write_text(text)
    with contextlib.suppress(UsageError):
        assert isinstance(read_script(path, {"A": "x y"}), Launch)


_PIECES = st.sampled_from(
    [
        *(
            "a",
            "b1",
            "-x",
            "--k=v",
            " ",
            "  ",
            '"',
            "'",
            "\\",
            "#",
            "=",
            "{",
            "}",
            "%",
            ":",
            ",",
            "@",
        ),
        *("$A", "${A}", '"$A"', "$B", "${B[1]}", "${B[@]}", '"${B[@]}"', '"${B[*]}"', '"${E[@]}"'),
        *("$U", '"$U"', "${U:-d e}", '"${U:-d e}"', '${U-"q r"}', "${A:+x y}", "${E:-z}", "${E-z}"),
        *(
            "${U:-$A}",
            '${U:-"${B[@]}"}',
            "\\$A",
            '\\"',
            '"\\a"',
            "$'q\\n'",
            "~/",
            " \\\n ",
            ";",
            " 0</dev/null ",
        ),
    ]
)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(_PIECES, max_size=9).map("".join))
def test_words_are_what_bash_makes_of_them(
    tmp_path_factory: pytest.TempPathFactory, words: str
) -> None:
    text = f'A="x  y"\nB=(p "q r" s)\nE=\n{SERVER} {words}\n'
    stand_in = "python() { shift 2; if (($#)); then printf '%s\\0' \"$@\"; fi; }\n"
    folder = tmp_path_factory.getbasetemp()
    bash = subprocess.run(
        ["bash", "--norc", "-c", stand_in + text],
        env={**BASE, "PATH": "/usr/bin:/bin"},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    if bash.returncode == 0:
        expected = tuple(bash.stdout.decode().split("\0")[:-1])
        assert read(folder, text).flags == expected


def test_arguments_on_our_own_command_line() -> None:
    launch = from_arguments(None, ["--model-path", "/m", "--tp", "4"], {"A": "1"})
    assert (launch.model, launch.flags, launch.environment) == ("/m", ("--tp", "4"), {"A": "1"})
    assert launch.source == "command line"
    assert launch.line is None
    assert from_arguments("/m", ["--model=/m"], {}).model == "/m"
    with pytest.raises(UsageError, match="--model-path after"):
        from_arguments("/m", ["--model-path", "/other"], {})


_NAMES = st.sampled_from(["A", "B", "C"])
_VALUES = st.sampled_from(
    ["x", "y", "'p q'", "$A", '"$B"', '"$A$C"', "$((1 + 2))", "${C:-z}", '"$(true)"']
)
_TESTS = st.sampled_from(
    [
        *('[ "$A" = x ]', "[[ $B == p* ]]", '[[ $A != x && -n "$B" ]]', "[ -z $C ]", "true"),
        *("false", '[[ "$A" == "p*" || $C == 3 ]]', "! [ 1 -gt 2 ]", "[ -f /nowhere ]"),
    ]
)


def _statements(depth: int) -> st.SearchStrategy[str]:
    simple = st.one_of(
        st.builds("{}={}".format, _NAMES, _VALUES),
        st.builds("{}+={}".format, _NAMES, _VALUES),
        st.builds("L+=({} {})".format, _VALUES, _VALUES),
        st.builds("{} && {}={}".format, _TESTS, _NAMES, _VALUES),
        st.builds("{} || {}={}".format, _TESTS, _NAMES, _VALUES),
        st.builds("f {} {}".format, _VALUES, _VALUES),
    )
    if depth == 0:
        return simple
    body = st.lists(_statements(depth - 1), min_size=1, max_size=3).map("\n".join)
    return st.one_of(
        simple,
        st.builds("if {}; then\n{}\nelse\n{}\nfi".format, _TESTS, body, body),
        st.builds("if {}\nthen {}\nelif {}; then\n{}\nfi".format, _TESTS, body, _TESTS, body),
        st.builds("case {} in\nx|3) {} ;;\n(p*) {} ;;\nesac".format, _VALUES, body, body),
        st.builds('case "$A" in y) {} ;& x) {} ;; *) {}\nesac'.format, body, body, body),
        st.builds("for i in {} {}; do\n{}\ndone".format, _VALUES, _VALUES, body),
        st.builds("{} && {{ {}\n}}".format, _TESTS, body),
    )


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(_statements(2), min_size=1, max_size=5).map("\n".join))
def test_what_is_known_of_a_script_is_what_bash_does(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    """Whatever stands in front: an argument that is not said to be unknown is the right one."""
    function = 'f() { local v=$1; shift; A="$v"; [ "$1" = x ] && L+=("$@"); C=$#; }\n'
    script = f'A=x\nB="p q"\nL=(--l)\n{function}{text}\n'
    script += f'{SERVER} --a="$A" --b="$B" --c="$C" "${{L[@]}}" --end\n'
    stand_in = "python() { shift 2; printf '%s\\0' \"$@\"; }\n"
    bash = subprocess.run(
        ["bash", "--norc", "-c", stand_in + script],
        env={"PATH": "/usr/bin:/bin"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
    )
    expected = tuple(bash.stdout.decode().split("\0")[:-1])
    path = tmp_path_factory.getbasetemp() / "flow.sh"
    path.write_text(script)
    launch = read_script(path, {})
    if not launch.unknown:
        assert launch.flags == expected
        return
    # What is unknown is named; what is not named is right.
    said = " ".join(launch.unknown)
    for flag, name in (("--a=", "A"), ("--b=", "B"), ("--c=", "C")):
        mine = next(one for one in launch.flags if one.startswith(flag))
        theirs = next(one for one in expected if one.startswith(flag))
        assert mine == theirs or f"the value of {flag[:-1]}" in said, name


def test_notes_are_few_and_true(tmp_path: Path) -> None:
    text = (
        "R=${1:?prefill or decode}\nwhile getopts a: opt; do case $opt in a) A=1 ;; esac; done\n"
        f"sleep 1 &\nP=$!\ncase $R in\n a) ;;\n b) ;;\nesac\n{SERVER} --model /m --tp 4\n"
    )
    launch = read(tmp_path, text)
    assert (launch.flags, launch.unknown) == (("--tp", "4"), ())
    assert launch.notes == (
        "line 1: $1 is not set, and the script stops without it",
        "line 2: the script is taken to be called without arguments",
        "line 4: cannot know $!",
        "line 5: cannot know the word of this case; every arm that may run was read",
    )


def test_a_variable_that_docker_passes_on_is_not_said_to_be_lost(tmp_path: Path) -> None:
    script = tmp_path / "serve.sh"
    script.write_text(
        "export NCCL_P2P_DISABLE=1 UCX_TLS=tcp\n"
        "docker run -e NCCL_P2P_DISABLE image python -m sglang.launch_server --model-path /m\n"
    )
    launch = read_script(script, {})
    assert launch.environment == {"NCCL_P2P_DISABLE": "1"}
    assert "the container gets its variables from -e only, not UCX_TLS" in launch.notes
    script.write_text(script.read_text().replace(" UCX_TLS=tcp", ""))
    assert read_script(script, {}).notes == ()


@pytest.mark.parametrize(
    ("option", "devices"),
    [
        ("--gpus all", ()),
        ("--gpus device=3", ("3",)),
        ("""--gpus '"device=4,5"'""", ("4", "5")),
        ("""--gpus='"device=4,5",capabilities=utility'""", ("4", "5")),
        ("--gpus device=GPU-5fd4f087", ("GPU-5fd4f087",)),
        ("--gpus 2", ("0", "1")),
    ],
)
@pytest.mark.parametrize("inner", [SERVER + " --model /m", f"bash -c '{SERVER} --model /m'"])
def test_gpus_of_a_container(
    option: str, devices: tuple[str, ...], inner: str, tmp_path: Path
) -> None:
    assert read(tmp_path, f"docker run {option} image {inner}").devices == devices
