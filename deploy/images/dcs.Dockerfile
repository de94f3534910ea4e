# The distributed checkpoint service: versions of the weights. Build from the repository's root:
#   docker build -f deploy/images/dcs.Dockerfile -t slipstream/dcs .
ARG BASE=python:3.11-slim

FROM ${BASE} AS build
RUN python3 -m venv /opt/slipstream
ENV PATH=/opt/slipstream/bin:$PATH
WORKDIR /src
# Dependencies first: they change rarely, and their layer is reused.
COPY pyproject.toml README.md LICENSE constraints-cpu.txt ./
RUN mkdir shared services && touch shared/__init__.py services/__init__.py
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --constraint constraints-cpu.txt '.[dcs,store]'
COPY shared shared
COPY services services
RUN pip install --no-deps --force-reinstall --no-cache-dir .

FROM ${BASE}
LABEL org.opencontainers.image.title="slipstream dcs" \
      org.opencontainers.image.description="Versions of the weights: who publishes, who receives" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/slipstream /opt/slipstream
ENV PATH=/opt/slipstream/bin:$PATH \
    HOME=/slipstream \
    OMP_NUM_THREADS=1 \
    PYTHONUNBUFFERED=1 \
    SLIPSTREAM_HEALTH_FILE=/tmp/alive
# Folders that volumes are put on: a new volume takes over the owner of what it covers.
RUN mkdir -p /slipstream/runs && chown -R 10001:10001 /slipstream
WORKDIR /slipstream
USER 10001:10001
# The worker's own loop touches the file; one that hangs stops doing so.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["/bin/sh", "-c", "test $(( $(date +%s) - $(stat -c %Y /tmp/alive) )) -lt 60"]
ENTRYPOINT ["slipstream", "serve", "dcs"]
