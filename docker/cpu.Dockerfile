# kvbench with Mooncake and NIXL over host memory: `sweep quickstart` in a container, or a client of servers
# elsewhere. Not built by us: checked by a linter only.
#   docker build -f docker/cpu.Dockerfile -t kvbench .
#   docker run --rm --shm-size=1g -v $PWD/results:/results kvbench sweep quickstart
FROM python:3.12-slim-bookworm AS build
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN python -m venv /opt/kvbench \
 && /opt/kvbench/bin/pip install --no-cache-dir -c constraints.txt '.[mooncake,ssh]' \
 && /opt/kvbench/bin/pip install --no-cache-dir --no-deps -c constraints.txt nixl-cu12

FROM python:3.12-slim-bookworm
# What Mooncake's wheel is linked against and does not bring along.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends libibverbs1 libnl-3-200 libnl-route-3-200 libnuma1 libcurl4 \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 1000 --create-home bench \
 && install -d -o bench /results
COPY --from=build /opt/kvbench /opt/kvbench
ENV PATH=/opt/kvbench/bin:$PATH \
    KVBENCH_OUTPUT=/results
USER 1000
WORKDIR /home/bench
ENTRYPOINT ["kvbench"]
CMD ["--help"]
