# Two images from one file:
#   docker build --target cpu -t megatron:cpu .     no GPU: everything runs on gloo; `docker run megatron:cpu make test`
#   docker build -t megatron .                      CUDA with Transformer Engine and apex
# Build arguments: CUDA_IMAGE, TORCH_VERSION, PIP_INDEX (options for pip when it installs torch, for example
# "--index-url <index of CPU builds>" to keep the CPU image small), TE_VERSION, APEX_REF, INSTALL_TE=0/1, INSTALL_APEX=0/1, MAX_JOBS.
ARG CUDA_IMAGE=nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04
ARG PYTHON_IMAGE=python:3.12-slim-bookworm

FROM ${PYTHON_IMAGE} AS cpu
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ make git \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 trainer
ARG TORCH_VERSION=2.13.0
ARG PIP_INDEX=
WORKDIR /workspace
RUN chown trainer /workspace
USER trainer
COPY --chown=trainer:trainer setup.py pyproject.toml constraints.txt Makefile ./
COPY --chown=trainer:trainer megatron ./megatron
# torch first, so that `make setup` finds the build that PIP_INDEX chose.
RUN python3 -m venv .venv \
    && .venv/bin/pip install --no-cache-dir "torch==${TORCH_VERSION}" ${PIP_INDEX} \
    && make setup
COPY --chown=trainer:trainer . .
CMD ["make", "test"]

FROM ${CUDA_IMAGE} AS gpu
ENV DEBIAN_FRONTEND=noninteractive PATH=/opt/venv/bin:$PATH
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-dev python3-venv g++ make git ninja-build \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv
ARG TORCH_VERSION=2.13.0
ARG PIP_INDEX=
RUN pip install --no-cache-dir "torch==${TORCH_VERSION}" ${PIP_INDEX}
ARG MAX_JOBS=8
ARG INSTALL_TE=1
ARG TE_VERSION=2.9.0
RUN if [ "${INSTALL_TE}" = 1 ]; then \
        pip install --no-cache-dir ninja pybind11 wheel \
        && MAX_JOBS=${MAX_JOBS} pip install --no-cache-dir --no-build-isolation "transformer-engine[pytorch]==${TE_VERSION}"; \
    fi
ARG INSTALL_APEX=1
ARG APEX_REF=master
RUN if [ "${INSTALL_APEX}" = 1 ]; then \
        git clone --filter=blob:none https://github.com/NVIDIA/apex /tmp/apex \
        && git -C /tmp/apex checkout "${APEX_REF}" \
        && APEX_CPP_EXT=1 APEX_CUDA_EXT=1 MAX_JOBS=${MAX_JOBS} \
           pip install --no-cache-dir --no-build-isolation /tmp/apex \
        && rm -rf /tmp/apex; \
    fi
WORKDIR /workspace
COPY . .
RUN pip install --no-cache-dir -c constraints.txt -e . \
    && useradd --create-home --uid 1001 trainer \
    && chown -R trainer /workspace
USER trainer
CMD ["bash"]
