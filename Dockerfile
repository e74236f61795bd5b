# The image of agentenv. On a CPU:
#   docker build -t agentenv .
# With CUDA and vLLM (`docker run --gpus all --ipc host …`):
#   docker build -t agentenv:cuda --build-arg TORCH_ARGS= --build-arg EXTRAS=vllm,ray,train,endpoint,data .
FROM python:3.11-slim

ARG TORCH_ARGS="--index-url https://download.pytorch.org/whl/cpu"
ARG EXTRAS=ray,train,endpoint,data

# Triton, which torch.compile and vLLM use, compiles C while it runs; git is for datasets and plugins from repositories.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc git libc6-dev \
    && rm -rf /var/lib/apt/lists/*

# torch first and alone: TORCH_ARGS decides between the CPU's wheel and CUDA's.
COPY constraints.txt /src/
RUN pip install --no-cache-dir -c /src/constraints.txt ${TORCH_ARGS} torch
COPY pyproject.toml README.md LICENSE /src/
COPY agentenv /src/agentenv
COPY envs /src/envs
COPY agent_funcs /src/agent_funcs
RUN pip install --no-cache-dir -c /src/constraints.txt "/src[${EXTRAS}]"

WORKDIR /work
ENTRYPOINT ["agentenv"]
CMD ["--help"]
