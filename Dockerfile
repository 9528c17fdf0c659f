# syntax=docker/dockerfile:1
# vLLM's OpenAI server with nixl-offload, for nodes with GPUDirect Storage and for those without.
#
#   docker build -t vllm-nixl-offload .
#   docker run ... vllm-nixl-offload MODEL --kv-transfer-config "$KV"     in full: examples/docker/README.md
#
# The entrypoint is vLLM's own, `vllm serve`. By convention the config lies at /etc/nixl-offload/kv.yaml; what to give
# to --kv-transfer-config is printed by
#   docker run --rm --entrypoint nixl-offload -v "$PWD/kv.yaml:/etc/nixl-offload/kv.yaml:ro" vllm-nixl-offload \
#     show --kv-transfer-config /etc/nixl-offload/kv.yaml
#
# What the image has already, and keeps: torch and with it CUDA's libraries as wheels, libcufile among them (torch
# 2.14.0 asks for cuda-toolkit[cufile]==13.0.3, which is nvidia-cufile 1.15.1.6), NVIDIA's apt repository, pip, curl,
# and the user vllm (2000:0). Why each step is as it is, what of it has been checked, and how:
# docs/decisions/0015-container.md

ARG VLLM_TAG=v0.33.0

# ---- our wheel, and the list of pins that the image may add ----
FROM vllm/vllm-openai:${VLLM_TAG} AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY nixl_offload ./nixl_offload
# The image's setuptools builds it: nothing is downloaded.
RUN python3 -m pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheels .
# What the image has stays as it is (image.txt); what it lacks comes at the version that our tests run with
# (lacking.txt). Packages of the distribution may have versions that pip refuses to read in a file of constraints: they
# are left out.
COPY constraints.txt constraints-gpu.txt /wheels/
RUN python3 <<'PINS'
import importlib.metadata, pathlib, re
from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

def plain(name):
    return re.sub(r"[-_.]+", "-", name).lower()

image = {}
for found in importlib.metadata.distributions():
    try:
        image[plain(found.name)] = Version(found.version)
    except (InvalidVersion, TypeError, AttributeError):
        pass
wheels = pathlib.Path("/wheels")
pins = [line for line in (wheels / "constraints.txt").read_text().splitlines() if re.match(r"\w", line)]
lacking = [pin for pin in pins if plain(Requirement(pin).name) not in image]
(wheels / "image.txt").write_text("".join(f"{name}=={version}\n" for name, version in sorted(image.items())))
(wheels / "lacking.txt").write_text("".join(f"{pin}\n" for pin in lacking))
PINS

# ---- the image ----
FROM vllm/vllm-openai:${VLLM_TAG}
# root to install; the last USER is what runs.
USER 0
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# libcufile where programs without torch look for it, and gdscheck, gdsio (/usr/local/cuda/gds/tools). Of the image's
# own CUDA release, which is the release of torch's libcufile too: all copies are called libcufile.so.0, and whichever
# is loaded first is the process's only one. /etc/cufile.json is a link of that package to its own file: ours comes
# instead.
# hadolint ignore=DL3008
RUN cuda="$(python3 -c 'import torch; print(torch.version.cuda.replace(".", "-"))')" \
 && apt-get update \
 && apt-get install -y --no-install-recommends "libcufile-${cuda}" "gds-tools-${cuda}" \
 && rm -f /etc/cufile.json \
 && rm -rf /var/lib/apt/lists/*

# NVIDIA's client for S3 over RDMA (cuObject), without which NIXL's plugin OBJ for CUDA 13 does not load; `mover: auto`
# takes obstore then. NVIDIA's apt repository has it from CUDA 13.1 on (libcuobjclient-13-1 is 1.0.0.26, -13-3 is
# 1.2.0.68, -13-4 is 1.3.1.55); no registry of wheels has it. Off by default, for it wants a cuFile newer than torch's,
# which then replaces that, and nobody has run the two together with this image yet. To try it:
#   --build-arg CUOBJ=libcuobjclient-13-3 --build-arg CUFILE=1.18.1.6
# Unpacked, not installed: its dependencies would turn /usr/local/cuda to another release, which vLLM compiles with.
ARG CUOBJ=""
ARG CUFILE=""
# hadolint ignore=DL3003
RUN if [ -n "${CUOBJ}" ]; then \
      : "${CUFILE:?say --build-arg CUFILE=VERSION too, the nvidia-cufile of the same CUDA release}" \
      && apt-get update && cd /tmp && apt-get download "${CUOBJ}" && dpkg-deb -x "${CUOBJ}"_*.deb cuobj \
      && find cuobj -name 'libcuobjclient.so.*' -exec cp -P {} /usr/local/lib/ ';' && ldconfig \
      && python3 -m pip install --no-cache-dir --no-deps "nvidia-cufile==${CUFILE}" \
      && rm -rf cuobj "${CUOBJ}"_*.deb /var/lib/apt/lists/*; \
    fi

# NIXL and KvikIO of the image's CUDA. --no-deps: what they would bring (torch, CUDA, cupy) is there or never imported.
# hadolint ignore=DL3042
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    cuda="$(python3 -c 'import torch; print(torch.version.cuda.split(".")[0])')" \
 && python3 -m pip install --no-cache-dir --no-deps -c /wheels/constraints-gpu.txt \
      nixl "nixl-cu${cuda}" "kvikio-cu${cuda}" "libkvikio-cu${cuda}" rapids-logger

# nixl-offload and the S3 clients. Fails, rather than change a package that vLLM came with.
# hadolint ignore=DL3013,DL3042
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    python3 -m pip install --no-cache-dir -c /wheels/image.txt -c /wheels/lacking.txt \
      "$(echo /wheels/nixl_offload-*.whl)[s3]" \
 && nixl-offload --version

# cuFile reads /etc/cufile.json. NVIDIA's container runtime, asked by NVIDIA_GDS=enabled, mounts the host's over it; the
# second copy is for those who want ours all the same: CUFILE_ENV_PATH_JSON=/usr/local/share/nixl-offload/cufile.json
COPY --chmod=0644 nixl_offload/configs/cufile.json /etc/cufile.json
COPY --chmod=0644 nixl_offload/configs/cufile.json /usr/local/share/nixl-offload/cufile.json

# The directory of the config, and the log of cuFile where the user may write (its default is the working directory).
RUN mkdir -p /etc/nixl-offload
ENV CUFILE_LOGFILE_PATH=/tmp/cufile.log

ARG VERSION=0.1.0
ARG REVISION=""
LABEL org.opencontainers.image.title="vllm-nixl-offload" \
      org.opencontainers.image.description="vLLM's OpenAI server with its KV cache on NVMe files and in S3 buckets" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

# vLLM answers 200 while its engine lives. Loading a large model takes long: failures of the first half hour do not
# count.
HEALTHCHECK --start-period=30m --interval=15s --timeout=5s --retries=4 \
  CMD ["curl", "-fsS", "-o", "/dev/null", "http://127.0.0.1:8000/health"]

# vLLM's own user. GPUDirect Storage needs no root and no capability: nvidia-fs makes its nodes with mode 0666,
# /run/udev and /proc/driver/nvidia-fs are readable by all. What must be so on the host is that 2000 may write where the
# tiers are:
#   install -d -o 2000 -g 0 -m 0700 /mnt/nvme/kv
# By number, so that Kubernetes can see that it is not root (runAsNonRoot).
USER 2000:0
WORKDIR /home/vllm
