# kvbench beside vLLM, for nodes with NVIDIA GPUs: engines start from the image's own vLLM, kvbench has an
# environment of its own, so that neither changes the other's versions. Not built by us: checked by a linter only.
#   docker build -f docker/cuda.Dockerfile --build-arg VLLM=v0.13.0 -t kvbench-cuda .
#   docker run --rm --gpus all --ipc=host --ulimit memlock=-1 --network host \
#     --device /dev/infiniband -v $PWD/results:/results kvbench-cuda doctor
ARG VLLM=v0.13.0
FROM vllm/vllm-openai:${VLLM}
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# Root, as the image itself: RDMA devices and locked memory are the usual reason.
# hadolint ignore=DL3002
USER 0
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev python3-venv python3-dev \
      libibverbs1 librdmacm1 libnl-3-200 libnl-route-3-200 libnuma1 libcurl4 \
 && rm -rf /var/lib/apt/lists/*
# vLLM's own environment needs the connectors' libraries: what its connectors import runs in its processes.
# hadolint ignore=DL3013
RUN python3 -m pip install --no-cache-dir --no-deps nixl-cu12 mooncake-transfer-engine
WORKDIR /src
COPY . .
RUN python3 -m venv /opt/kvbench \
 && /opt/kvbench/bin/pip install --no-cache-dir -c constraints.txt '.[ssh]' \
 && /opt/kvbench/bin/pip install --no-cache-dir --no-deps -c constraints.txt nixl-cu12 mooncake-transfer-engine \
 && ln -s /opt/kvbench/bin/kvbench /usr/local/bin/kvbench \
 && install -d -m 1777 /results
ENV KVBENCH_OUTPUT=/results
WORKDIR /results
ENTRYPOINT ["kvbench"]
CMD ["--help"]
