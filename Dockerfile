# Two images from one file:
#   docker build --target cpu -t megatron:cpu .     no GPU: gloo; `docker run megatron:cpu` runs all tests
#   docker build --target gpu -t megatron .         CUDA: torch's wheels bring CUDA, cuDNN and NCCL, the driver is the host's
#   docker build --target gpu_te -t megatron:te .   the same with Transformer Engine and apex
# The two for GPUs are linted and have not been built yet (docs/gpu.md).
# Build arguments: TE_VERSION, APEX_COMMIT, CUDA_ARCHS, MAX_JOBS of that; PYTHON_IMAGE, CUDA_IMAGE; of the CPU stage TORCH_VERSION and CPU_INDEX, options for pip when it installs
# torch ("--index-url ..." chooses a build). Without Docker: `make image-steps` runs the steps of the CPU stage
# Images are pinned by digest, Python packages by the hashes of requirements/. Without a hash are: packages of apt (signed
# by their archive), the CPU build of torch (by version: its index has other files than PyPI), Transformer Engine with
# its dependencies (by version), and apex (by commit). SECURITY.md lists them, too.
ARG PYTHON_IMAGE=python:3.12.11-slim-bookworm@sha256:519591d6871b7bc437060736b9f7456b8731f1499a57e22e6c285135ae657bf7
ARG CUDA_IMAGE=nvidia/cuda:13.0.1-base-ubuntu24.04@sha256:f8ef28f579ea42a44b415d2c5d46f788e6a9b395c6c83f2929416e1fc192c143

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
COPY --chown=1001:1001 tools ./tools
COPY --chown=1001:1001 requirements ./requirements
ARG TORCH_VERSION=2.13.0
ARG CPU_INDEX="--index-url https://download.pytorch.org/whl/cpu"
# torch first, without what it needs: that has hashes, too.
RUN python3 -m venv .venv \
    && .venv/bin/pip install --no-cache-dir --no-deps "torch==${TORCH_VERSION}" ${CPU_INDEX} \
    && .venv/bin/pip install --no-cache-dir --no-deps --require-hashes -r requirements/hashed.txt \
    && make setup SETUP_FLAGS="--no-build-isolation --no-deps"
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
COPY --chown=1001:1001 tools ./tools
COPY --chown=1001:1001 requirements ./requirements
RUN python3 -m venv .venv \
    && .venv/bin/pip install --no-cache-dir --no-deps --require-hashes -r requirements/hashed.txt \
        -r requirements/torch-cuda.txt \
    && make setup SETUP_FLAGS="--no-build-isolation --no-deps"
COPY --chown=1001:1001 . .
ENV PATH=/workspace/.venv/bin:$PATH
CMD ["bash"]

FROM gpu AS gpu_te
# Both are compiled here, against the torch above, with nvcc and the headers of the same CUDA. Those of
# cuDNN and NCCL are in the wheels that torch uses: apt has newer ones.
USER 0:0
RUN apt-get update \
    && apt-get install -y --no-install-recommends cuda-nvcc-13-0 cuda-cudart-dev-13-0 cuda-nvrtc-dev-13-0 \
        cuda-profiler-api-13-0 libcublas-dev-13-0 libcusparse-dev-13-0 libcusolver-dev-13-0 \
    && rm -rf /var/lib/apt/lists/*
USER 1001:1001
ARG TE_VERSION=2.20.2
# The tag 25.09.
ARG APEX_COMMIT=4bdecd06b3c4b2c0a8fb6603829a8f9f05a42b49
# Hopper and Blackwell; and compilers at once, which take some GB each.
ARG CUDA_ARCHS="9.0;10.0"
ARG MAX_JOBS=4
RUN export TORCH_CUDA_ARCH_LIST="${CUDA_ARCHS}" MAX_JOBS="${MAX_JOBS}" APEX_CPP_EXT=1 APEX_CUDA_EXT=1 \
        NVTE_BUILD_USE_NVIDIA_WHEELS=1 \
    && .venv/bin/pip install --no-cache-dir --no-build-isolation "transformer_engine[core_cu13,pytorch]==${TE_VERSION}" \
    && .venv/bin/pip install --no-cache-dir --no-build-isolation "git+https://github.com/NVIDIA/apex@${APEX_COMMIT}"
