# Qinglan's flows with Prefect and MLflow, without any training engine. By its command it is Prefect's server, MLflow's,
# a worker, or the one that deploys: compose.yaml has them all, docs/how-to/containers.md the steps.
#
#   docker build --file docker/orchestrator.Dockerfile --tag qinglan-orchestrator:0.1.0 .
#
# Where PyPI is reached through a mirror: --secret id=pip,src=/etc/pip.conf gives pip its configuration, and leaves no
# trace of it in the image.
ARG PYTHON=python:3.11.15-slim-bookworm
FROM ${PYTHON} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
COPY docker/orchestrator.lock docker/orchestrator.lock
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    python -m venv /opt/orchestrator \
 && /opt/orchestrator/bin/pip install --no-deps --require-hashes --requirement docker/orchestrator.lock
COPY pyproject.toml README.md LICENSE ./
COPY qinglan qinglan
# What MLflow names for models of kinds that are not logged here is taken out again, as are the packages' own tests.
RUN /opt/orchestrator/bin/pip install --no-deps --no-build-isolation . \
 && /opt/orchestrator/bin/pip check \
 && /opt/orchestrator/bin/pip uninstall --yes contourpy fonttools joblib kiwisolver matplotlib pillow scikit-learn skops \
 && find /opt/orchestrator/lib -type d -name tests -prune -exec rm -rf {} +

FROM ${PYTHON}
ENV PYTHONUNBUFFERED=1 PATH=/opt/orchestrator/bin:$PATH \
    DO_NOT_TRACK=true MLFLOW_DISABLE_TELEMETRY=true PREFECT_SERVER_ANALYTICS_ENABLED=false \
    PREFECT_SERVER_UI_STATIC_DIRECTORY=/srv/qinglan/pages
WORKDIR /srv/qinglan
# The link keeps Prefect from serving its new pages, which report to Amplitude from the browser: qinglan/ops/up/site.py.
RUN useradd --create-home --uid 1000 --user-group qinglan \
 && mkdir -p runs .qinglan data pages \
 && ln -s not-served pages/v2 \
 && chown qinglan:qinglan . runs .qinglan data pages
COPY --from=build /opt/orchestrator /opt/orchestrator
COPY --chmod=755 docker/entrypoint.sh /usr/local/bin/entrypoint
COPY --chmod=755 docker/healthy.py /usr/local/bin/healthy
COPY docker/make_bucket.py docker/
USER 1000:1000

ENTRYPOINT ["entrypoint"]
# Of a worker; compose.yaml has others for the other commands.
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s CMD ["healthy", "http://127.0.0.1:8080/health"]
CMD ["prefect", "worker", "start", "--pool=qinglan", "--type=process", "--install-policy=never", "--with-healthcheck", "--limit=4"]
