# Two targets: a CPU image that runs the quick start and the tests, and a CUDA image with SGLang beside it.
#
#   docker build --target cpu -t slime:cpu .
#   docker run --rm --shm-size 2g slime:cpu slime quickstart
#   docker build --target cuda -t slime:cuda .
#   docker run --rm --gpus all --shm-size 64g -v "$PWD/runs:/slime/runs" slime:cuda slime doctor --config recipes/gpu80/math.yaml
#
# --shm-size: weights and batches travel through shared memory; Docker's default of 64 MiB is too small.
# Programs of a model (--rm-type code, tools) run in bubblewrap, which needs user namespaces; Docker denies them unless
# the container is started with --security-opt seccomp=unconfined --security-opt apparmor=unconfined.
# wget: probes of the KubeRay operator call it in the pods of launchers/kuberay.yaml.
# Linted by hadolint. Not built here: no machine with a network and a Docker daemon was at hand.

# Versions of the system's packages are those of the base image's release.
FROM python:3.11-slim AS cpu
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends bubblewrap build-essential git && rm -rf /var/lib/apt/lists/*
WORKDIR /slime
COPY pyproject.toml constraints-cpu.txt README.md LICENSE ./
COPY slime slime
RUN pip install --no-cache-dir -r constraints-cpu.txt \
    && pip install --no-cache-dir -c constraints-cpu.txt -e ".[data,hf,ray,smollm2,lora,tensorboard]"
COPY . .
RUN useradd --create-home --uid 1000 user && chown -R user /slime
USER 1000
CMD ["slime", "quickstart"]

FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS cuda
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap build-essential git python3 python3-dev python3-venv wget \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /slime
ENV PATH=/slime/.venv/bin:$PATH
COPY pyproject.toml README.md LICENSE ./
COPY slime slime
# SGLang pins its own torch: an environment of its own, where `--sglang-python` looks first.
RUN python3 -m venv .venv && pip install --no-cache-dir -e ".[all,megatron]" \
    && python3 -m venv .venv-sglang && .venv-sglang/bin/pip install --no-cache-dir "sglang==0.5.23"
COPY . .
CMD ["slime", "--help"]
