# An image of `gapless serve`; docs/deploy.md says how to build and run it.
FROM python:3.12-slim AS build

# "[cuda]" for NVIDIA GPUs
ARG EXTRAS=""
# further arguments of pip, such as an index that has CPU builds of torch
ARG PIP_ARGS=""

WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE NOTICE ./
COPY gapless gapless
RUN python -m venv /opt/gapless \
    && /opt/gapless/bin/pip install --no-cache-dir -c constraints.txt ${PIP_ARGS} ".${EXTRAS}"

FROM python:3.12-slim

ARG EXTRAS=""
# Triton compiles its launchers with the system's C compiler, at run time
RUN if [ -n "${EXTRAS}" ]; then \
        apt-get update \
        && apt-get install -y --no-install-recommends gcc libc6-dev \
        && rm -rf /var/lib/apt/lists/*; \
    fi \
    && useradd --uid 10001 --create-home gapless \
    && mkdir /cache && chown gapless /cache
COPY --from=build /opt/gapless /opt/gapless

USER gapless
ENV PATH=/opt/gapless/bin:$PATH HF_HOME=/cache
VOLUME /cache
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m CMD \
    ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/ready', timeout=4)"]
# no shell in between: SIGTERM must reach the server, which then drains
ENTRYPOINT ["gapless", "serve", "--host", "0.0.0.0"]
