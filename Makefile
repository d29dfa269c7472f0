# make demo: the whole story on a fixture.   make test: what CI runs.   make bench: the bars.
# Both set up what they need in $(VENV); only python3.11 or newer has to be there.
PYTHON ?= python3
VENV ?= .venv
# A CPU build is enough: the doctor never touches a GPU.
TORCH ?= torch==2.13.0
# A CPU build of torch brings no Triton.
TRITON ?= triton==3.6.0; platform_system == "Linux"
SGLANG ?= 0.5.14
BIN := $(VENV)/bin
MODEL := .demo/DeepSeek-V4-Flash-NVFP4

.PHONY: demo test lint bench clean

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "python3.11 or newer is needed (PYTHON=...)")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/python -m pip install --quiet '$(TRITON)'
	$(BIN)/python -m pip install --quiet -e '.[trace,test]'
	touch $@

$(MODEL)/config.json: $(VENV)/.ready
	$(BIN)/python tests/checkpoints/make_checkpoint.py \
	    tests/checkpoints/nvidia__DeepSeek-V4-Flash-NVFP4.json $(MODEL)

# Exit code 1 says that the doctor found what it should.
demo: $(MODEL)/config.json
	sed 's|@MODEL@|$(CURDIR)/$(MODEL)|' tests/data/serve.sh > .demo/serve.sh
	$(BIN)/dsv4doctor check --launch .demo/serve.sh --sglang $(SGLANG) --arch sm_120; \
	    status=$$?; test $$status -eq 1 || { echo "expected findings, got exit code $$status"; exit 1; }

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -q -n 2

bench: $(MODEL)/config.json
	$(BIN)/python tests/benchmarks/bench_trace.py $(MODEL) --sglang $(SGLANG)

clean:
	rm -rf $(VENV) .demo build *.egg-info
