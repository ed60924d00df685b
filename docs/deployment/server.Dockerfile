# vLLM with the scheduler plugin and nothing else of ebbench.
#   docker build -f docs/deployment/server.Dockerfile -t vllm-eb .
#   docker run --gpus all -p 8000:8000 vllm-eb Qwen/Qwen3-8B --host 0.0.0.0 --port 8000 --scheduler-cls ...
# The arguments are those that `ebbench serve ... --host 0.0.0.0 --print` prints after `vllm serve`.
FROM vllm/vllm-openai:v0.32.0

COPY LICENSE /src/
COPY ebbench/__init__.py /src/ebbench/
COPY patches /src/patches

# What the plugin needs is there: vLLM brings it.
RUN python3 -m pip install --no-cache-dir --no-deps /src/patches \
    && python3 -c "from vllm_eb import config, metrics, stat_logger"

ENTRYPOINT ["vllm", "serve"]
