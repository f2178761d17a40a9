# One image for the head, the workers and Ray's autoscaler:
#   docker build -t conflux-ray:0.1.0 .                             # NVIDIA Hopper, locks/gpu.txt
#   docker build --build-arg TARGET=cpu -t conflux-ray:0.1.0-cpu .  # no GPU, locks/cpu.txt
ARG PYTHON=python:3.12-slim

FROM ${PYTHON} AS build
ARG TARGET=gpu
RUN python -m venv /opt/conflux
ENV PATH=/opt/conflux/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY locks/cpu.txt locks/gpu.txt locks/
# The CPU lock holds the tools of the tests too; and vLLM is installed without the GPU packages that it declares.
RUN set -eu; \
    pip install "setuptools>=77"; \
    case "$TARGET" in \
      gpu) pip install -r locks/gpu.txt ;; \
      cpu) pip install "$(grep '^torch==' locks/cpu.txt)"; \
           grep -vE '^(grafana-foundation-sdk|helm-python-sdk|hypothesis|kubernetes-validate|mypy|pytest|pytest-timeout|ruff|types-pyyaml)==' locks/cpu.txt > /tmp/lock; \
           pip install --no-deps -r /tmp/lock ;; \
      *) echo "TARGET=$TARGET: no such target; use gpu or cpu" >&2; exit 1 ;; \
    esac
COPY pyproject.toml README.md ./
COPY conflux_ray conflux_ray
RUN pip install --no-deps --no-build-isolation .

FROM ${PYTHON}
ARG TARGET=gpu
# bash, wget: KubeRay starts Ray with the one and probes it with the other. gcc: Triton compiles launchers on a GPU.
RUN set -eu; \
    apt-get update; \
    apt-get install -y --no-install-recommends bash procps wget libgomp1; \
    if [ "$TARGET" = gpu ]; then apt-get install -y --no-install-recommends gcc g++ libc6-dev; fi; \
    rm -rf /var/lib/apt/lists/*; \
    useradd --uid 1000 --user-group --create-home conflux
COPY --from=build /opt/conflux /opt/conflux
# HOME and the model folders are volumes in Kubernetes (the root may be read-only there); elsewhere they are here.
ENV PATH=/opt/conflux/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    VLLM_NO_USAGE_STATS=1 \
    RAY_USAGE_STATS_ENABLED=0 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000:1000
WORKDIR /home/conflux
# Fails where a library of the image is missing, rather than in the cluster.
RUN python -m conflux_ray.serving.environment | grep -q RAY_SERVE_ENABLE_HA_PROXY && conflux --version
EXPOSE 8000 8265 6379 8080
# `docker run` needs a configuration: docker run conflux-ray:0.1.0-cpu conflux serve deployment.yaml
CMD ["conflux", "--help"]
