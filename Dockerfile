# Instar on GPUs: docker build -t instar . && docker run --gpus all --ipc host --network host -v $PWD/runs:/instar/runs
# -v $PWD/models:/instar/models -e RECIPE=... instar. --build-arg DEVICE=cpu BASE=python:3.12-slim for the rehearsal.
# Not measured yet: no container runtime was at hand when this was written.
ARG BASE=nvidia/cuda:12.9.1-devel-ubuntu24.04
FROM ${BASE}
ARG DEVICE=cuda
RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-venv python3-dev gcc g++ procps \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /instar
COPY tools/setup.sh tools/
COPY requirements.txt requirements-${DEVICE}.txt ./
RUN DEVICE=${DEVICE} bash -c 'set -Eeuo pipefail; . tools/setup.sh; setup'
COPY . .
ENTRYPOINT ["bash", "run_2x8.sh"]
