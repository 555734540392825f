# Two images from one file:
#   docker build --target cpu -t megatron:cpu .     no GPU: gloo; `docker run megatron:cpu` runs all tests
#   docker build --target gpu -t megatron .         CUDA: torch's wheels bring CUDA, cuDNN and NCCL, the driver is the host's
# Build arguments: PYTHON_IMAGE, CUDA_IMAGE, TORCH_VERSION, and CPU_INDEX or GPU_INDEX, options for pip when it installs
# torch ("--index-url ..." chooses a build). Without Docker: `make image-steps` runs the steps of the CPU stage
# Tags can be moved: give NAME:TAG@sha256:DIGEST for images that are the same for ever.
ARG PYTHON_IMAGE=python:3.12.11-slim-bookworm
ARG CUDA_IMAGE=nvidia/cuda:13.0.1-base-ubuntu24.04

FROM ${PYTHON_IMAGE} AS cpu
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ make git \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1001 trainer
WORKDIR /workspace
RUN chown 1001:1001 .
USER 1001:1001
COPY --chown=1001:1001 setup.py pyproject.toml constraints.txt Makefile pretrain_gpt.py ./
COPY --chown=1001:1001 megatron ./megatron
ARG TORCH_VERSION=2.13.0
ARG CPU_INDEX="--index-url https://download.pytorch.org/whl/cpu"
# torch first, so that `make setup` finds the build that is wanted.
RUN python3 -m venv .venv \
    && .venv/bin/pip install --no-cache-dir "torch==${TORCH_VERSION}" ${CPU_INDEX} \
    && make setup
COPY --chown=1001:1001 . .
CMD ["make", "test"]

FROM ${CUDA_IMAGE} AS gpu
# The compiler is for the extension, and with Python's headers for --compile.
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-dev python3-venv g++ make git \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1001 trainer
WORKDIR /workspace
RUN chown 1001:1001 .
USER 1001:1001
COPY --chown=1001:1001 setup.py pyproject.toml constraints.txt Makefile pretrain_gpt.py ./
COPY --chown=1001:1001 megatron ./megatron
ARG TORCH_VERSION=2.13.0
ARG GPU_INDEX=""
RUN python3 -m venv .venv \
    && .venv/bin/pip install --no-cache-dir "torch==${TORCH_VERSION}" ${GPU_INDEX} \
    && make setup
COPY --chown=1001:1001 . .
ENV PATH=/workspace/.venv/bin:$PATH
CMD ["bash"]
