# ebbench itself, without vLLM: the gateway, the load generator, the simulator, reports.
#   docker build -f docs/deployment/client.Dockerfile -t ebbench .
#   docker run --rm -v "$PWD/runs:/data/runs" ebbench run sharegpt --engine http://server:8000
FROM python:3.12-slim AS build

WORKDIR /src
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY ebbench ebbench
COPY patches patches
COPY workloads workloads
COPY scenarios scenarios
COPY reports/reference reports/reference
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheel .

FROM python:3.12-slim

COPY --from=build /wheel /wheel
RUN python -m pip install --no-cache-dir "$(echo /wheel/ebbench-*.whl)[gateway]" \
    && useradd --create-home --uid 1000 ebbench \
    && install --directory --owner ebbench /data /data/runs

# Runs are written below /data; mount a volume there that user 1000 may write to.
USER 1000
WORKDIR /data
ENTRYPOINT ["ebbench"]
