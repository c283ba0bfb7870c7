# Prefect's worker with Qinglan's flows, without any training engine: enough for `refresh`, and for deploying.
#
#   docker build -f docker/orchestrator.Dockerfile -t qinglan-orchestrator .
#   docker run --env PREFECT_API_URL --env OPENAI_API_KEY --env DEEPSEEK_API_KEY \
#     --volume qinglan-runs:/srv/qinglan/runs --volume qinglan-state:/srv/qinglan/.qinglan \
#     --volume ./data:/srv/qinglan/data:ro qinglan-orchestrator
#
# Deploy from this image too, because workers run the flows in the folder from which they were deployed:
#   docker run --rm --env PREFECT_API_URL qinglan-orchestrator \
#     prefect --no-prompt deploy --prefect-file deployments/prefect.yaml --all
FROM python:3.11-slim

ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore \
    DO_NOT_TRACK=true MLFLOW_DISABLE_TELEMETRY=true PREFECT_SERVER_ANALYTICS_ENABLED=false \
    PATH=/opt/orchestrator/bin:$PATH
WORKDIR /srv/qinglan

# The lock keeps the versions, the package's own requirements say which of them are needed: no trainer extras.
COPY pyproject.toml requirements.lock README.md LICENSE ./
COPY qinglan qinglan
COPY flows flows
COPY tasks tasks
RUN python -m venv /opt/orchestrator \
 && pip install --constraint requirements.lock .
COPY configs configs
COPY deployments deployments
# Installed above; a second copy in the working directory would shadow it.
RUN rm -rf qinglan flows tasks build \
 && useradd --create-home --uid 1000 qinglan \
 && mkdir -p runs .qinglan data \
 && chown qinglan runs .qinglan data
USER qinglan

CMD ["prefect", "worker", "start", "--pool", "qinglan", "--type", "process", "--install-policy", "never", "--limit", "1"]
