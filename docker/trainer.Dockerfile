# The GPU worker: the orchestrator's environment in /opt/orchestrator, and the trainer's in /opt/trainer, because
# Prefect and vLLM disagree about FastAPI. Flows run in the first and start ms-swift and verl in the second, which a
# profile names: `trainer.python: /opt/trainer/bin/python`. Ray's nodes run this image as well.
#
#   docker build --file docker/orchestrator.Dockerfile --tag qinglan-orchestrator:0.1.0 .
#   docker build --file docker/trainer.Dockerfile --tag qinglan-trainer:0.1.0 .
#
# For machines without GPU, where LOCK and TORCH are of the CPU and CUDA is any image with a folder /usr/local/cuda-13.0:
# docker/try.sh has the command. --secret id=pip is that of orchestrator.Dockerfile.
ARG ORCHESTRATOR=qinglan-orchestrator:0.1.0
# The toolkit of the CUDA that torch 2.11 on PyPI is built for: DeepSpeed asks for its compiler when it is imported.
ARG CUDA=nvidia/cuda:13.0.1-devel-ubuntu22.04
ARG PYTHON=python:3.11.15-slim-bookworm
FROM ${ORCHESTRATOR} AS orchestrator
FROM ${CUDA} AS cuda
# Wheels that no index has, such as torch's of the CPU: --build-context wheels=FOLDER.
FROM scratch AS wheels

FROM ${PYTHON} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
RUN apt-get update \
 && apt-get install --yes --no-install-recommends build-essential=12.9 \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /build
ARG LOCK=docker/trainer.lock
# Installed before the lock, without a look at hashes: each index has a torch for CPUs of its own under one version.
ARG TORCH=
COPY docker/trainer.lock docker/trainer-cpu.lock docker/
COPY docker/vllm-name docker/vllm-name
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=bind,from=wheels,target=/wheels \
    python -m venv /opt/trainer \
 && if [ -n "${TORCH}" ]; then /opt/trainer/bin/pip install --no-deps --find-links /wheels "${TORCH}"; fi \
 && /opt/trainer/bin/pip install --no-deps --require-hashes --requirement ${LOCK}
COPY pyproject.toml README.md LICENSE ./
COPY qinglan qinglan
# Without its dependencies, which include Prefect: what its parts need that run here is in the lock.
RUN if [ -n "${TORCH}" ]; then /opt/trainer/bin/pip install --no-deps --no-build-isolation docker/vllm-name; fi \
 && /opt/trainer/bin/pip install --no-deps --no-build-isolation . \
 && /opt/trainer/bin/python -c "import qinglan.training.reward_service.function, qinglan.training.reward_service.scorer, qinglan.recipes.query_rewrite, \
qinglan.training.engines.generate, qinglan.training.engines.export"

FROM ${PYTHON}
ENV PYTHONUNBUFFERED=1 PATH=/opt/orchestrator/bin:$PATH CUDA_HOME=/usr/local/cuda-13.0 \
    DO_NOT_TRACK=true MLFLOW_DISABLE_TELEMETRY=true PREFECT_SERVER_ANALYTICS_ENABLED=false RAY_USAGE_STATS_ENABLED=0 \
    VLLM_NO_USAGE_STATS=1
# Triton compiles its kernels' launchers while it runs. verl binds each worker to the memory next to its GPU by
# libnuma.so, and goes on without where it is missing; vLLM's CPU build needs it. NCCL looks for libibverbs.so.1 when it
# starts, and goes on over TCP without.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends build-essential=12.9 libnuma-dev=2.0.16-1 libibverbs1=44.0-2 ibverbs-providers=44.0-2 \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home --uid 1000 --user-group qinglan
COPY --from=cuda /usr/local/cuda-13.0 /usr/local/cuda-13.0
COPY --from=build /opt/trainer /opt/trainer
COPY --from=orchestrator /usr/local/bin/entrypoint /usr/local/bin/healthy /usr/local/bin/
COPY --from=orchestrator /opt/orchestrator /opt/orchestrator
COPY --from=orchestrator --chown=1000:1000 /srv/qinglan /srv/qinglan
WORKDIR /srv/qinglan
USER 1000:1000

ENTRYPOINT ["entrypoint"]
# Of a worker; compose.yaml has others for the other commands.
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s CMD ["healthy", "http://127.0.0.1:8080/health"]
CMD ["prefect", "worker", "start", "--pool=qinglan-trainer", "--type=process", "--install-policy=never", "--with-healthcheck", "--limit=1"]
