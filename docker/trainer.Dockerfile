# The GPU worker: the orchestrator's environment in /opt/orchestrator, and the trainer's in /opt/trainer, because
# Prefect and vLLM disagree about FastAPI. Flows run in the first and start ms-swift and verl in the second, which a
# profile names: `trainer.python: /opt/trainer/bin/python`.
#
#   docker build -f docker/orchestrator.Dockerfile -t qinglan-orchestrator .
#   docker build -f docker/trainer.Dockerfile -t qinglan-trainer .
#   docker run --gpus all --ipc host --env PREFECT_API_URL --env OPENAI_API_KEY --env DEEPSEEK_API_KEY \
#     --volume qinglan-runs:/srv/qinglan/runs --volume qinglan-state:/srv/qinglan/.qinglan \
#     --volume ./data:/srv/qinglan/data:ro qinglan-trainer
ARG ORCHESTRATOR=qinglan-orchestrator
# The toolkit of the CUDA that torch 2.11 on PyPI is built for: DeepSpeed asks for its compiler when it is imported.
ARG CUDA=nvidia/cuda:13.0.1-devel-ubuntu22.04
FROM ${ORCHESTRATOR} AS orchestrator
FROM ${CUDA} AS cuda

FROM python:3.11-slim
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore \
    DO_NOT_TRACK=true MLFLOW_DISABLE_TELEMETRY=true RAY_USAGE_STATS_ENABLED=0 PREFECT_SERVER_ANALYTICS_ENABLED=false
COPY --from=cuda /usr/local/cuda-13.0 /usr/local/cuda-13.0
ENV CUDA_HOME=/usr/local/cuda-13.0
# Triton compiles its kernels' launchers.
RUN apt-get update && apt-get install --yes --no-install-recommends build-essential && rm -rf /var/lib/apt/lists/*

# Resolves to these with torch's CUDA libraries, and without prefect. They are stated, so that another resolution fails
# the build rather than a training run.
RUN python -m venv /opt/trainer \
 && /opt/trainer/bin/pip install "verl[vllm]==0.9.1" ms-swift==4.6.0 torch==2.11.0 vllm==0.24.0 transformers==5.9.0 \
      "ray[default]==2.60.0" transferqueue==0.1.11 tensordict==0.10.0 mlflow==3.17.2 \
 && /opt/trainer/bin/pip install --no-build-isolation deepspeed
# What the parts of Qinglan import that run here, the reward foremost; Qinglan itself without its dependencies, which
# include Prefect. A test holds this list to the imports.
WORKDIR /build
COPY pyproject.toml README.md LICENSE ./
COPY qinglan qinglan
COPY flows flows
COPY tasks tasks
RUN /opt/trainer/bin/pip install "openai>=3" "aiohttp>=3.9" "httpx>=0.27" "httpx2>=2" "tenacity>=9" "pydantic>=2.9" \
      "pyyaml>=6" "filelock>=3.13" "sqlalchemy>=2,<2.1" "psycopg[binary]>=3.2" "psutil>=5.9" "jieba>=0.42.1" \
 && /opt/trainer/bin/pip install --no-deps . \
 && /opt/trainer/bin/python -c "import qinglan.reward.function, qinglan.reward.scorer, qinglan.recipes.query_rewrite, \
qinglan.engines.generate, qinglan.engines.export, qinglan.engines.distill_ray" \
 && rm -rf /build

COPY --from=orchestrator /opt/orchestrator /opt/orchestrator
COPY --from=orchestrator /srv/qinglan /srv/qinglan
WORKDIR /srv/qinglan
RUN useradd --create-home --uid 1000 qinglan && chown qinglan runs .qinglan data
USER qinglan
ENV PATH=/opt/orchestrator/bin:$PATH

CMD ["prefect", "worker", "start", "--pool", "qinglan", "--type", "process", "--install-policy", "never", "--limit", "1"]
