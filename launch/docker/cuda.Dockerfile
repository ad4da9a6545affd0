# The image for NVIDIA GPUs: spmdrl with vLLM and Megatron-core, as pinned in constraints.txt.
#
#   make image                                  # docker build of this file, named as launch/image.env says
#   docker run --gpus all --shm-size 64g -v "$PWD:/workspace" IMAGE python -m spmdrl.ppo --help
#
# The wheels bring their CUDA libraries; the base has the compiler that kernels are built with at run
# time. The driver of the host must support CUDA 13. Rewards that run model-written code need user
# namespaces in the container: docs/sandbox.md.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

# No versions: Ubuntu keeps only the newest of each, so a pin stops to build within weeks.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        bubblewrap build-essential git libnuma1 openssh-server python3-dev python3-venv rsync \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/spmdrl

ENV PATH=/opt/spmdrl/bin:$PATH \
    PYTHONUNBUFFERED=1

WORKDIR /opt/source
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY spmdrl spmdrl
COPY kernels kernels
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --constraint constraints.txt '.[gpu,benchmarks,modelscope]'

WORKDIR /workspace
COPY configs configs
COPY examples examples
COPY launch launch
CMD ["python", "-m", "spmdrl.ppo", "--help"]
