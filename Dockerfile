# An image of the project: the libraries in one layer, the code in a small one on top, nobody's root. docs/containers.md says
# how it is run; scripts/apptainer.def is the same for Apptainer.
#
#   docker build --build-arg COMMIT=$(git describe --always --dirty=+ --exclude='*') -t project .
#   docker run --rm --gpus all --shm-size 8g -v $PWD/lightning_logs:/app/lightning_logs project \
#     scripts/launch.sh fit --config configs/ddp.yaml
#
# BASE       any image with Python 3.11 or 3.12, pip and bash. torch's wheels bring CUDA: no base of NVIDIA's is needed. The one
#            below is python:3.12-slim of August 2026; of a newer one, `docker buildx imagetools inspect` says the digest
# EXTRAS     of pyproject.toml, with commas: ray,export
# PACKAGES   of Debian, with blanks: g++ is what model.compile needs
# COMMIT     what is built, for the run's environment: there is no .git in an image
# PIP_INDEX_URL, PIP_EXTRA_INDEX_URL   other package indexes. They stay readable in the image: no passwords
ARG BASE=python:3.12-slim@sha256:78387bc3881b8273120a12ebe6c1ab22b018ccc2c9adf565ae1ac9b536e184ea

# A list of what to install changes less often than pyproject.toml; the layer below goes by its content.
FROM ${BASE} AS requirements
ARG EXTRAS=""
COPY pyproject.toml /
COPY scripts/requirements.py scripts/lock.txt /scripts/
RUN python /scripts/requirements.py "${EXTRAS}" > /requirements.txt

FROM ${BASE}
ARG PACKAGES=""
RUN if [ -n "${PACKAGES}" ]; then \
      apt-get update && apt-get install -y --no-install-recommends ${PACKAGES} && rm -rf /var/lib/apt/lists/*; \
    fi
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
COPY --from=requirements /requirements.txt /
RUN python -m pip install --no-cache-dir --disable-pip-version-check --root-user-action=ignore \
      --require-hashes -r /requirements.txt

# The user has a name, which some libraries ask for, and whoever runs it under another number is in group 0, as OpenShift has
# it. All that is written lies in lightning_logs and /tmp, so that the rest can be read-only.
RUN echo "project:x:1000:0:project:/tmp:/bin/sh" >> /etc/passwd && \
    mkdir -p /app/lightning_logs && chown 1000:0 /app/lightning_logs && chmod 775 /app/lightning_logs
ENV HOME=/tmp USER=project LOGNAME=project PROJECT_PYTHON=python
WORKDIR /app

COPY . .
ARG COMMIT=""
# Compiled here, as nobody can write it later; by the content of the files, so that code mounted over this one counts.
RUN python -m project.cluster.code "${COMMIT}" && \
    python -m compileall -q --invalidation-mode checked-hash project
USER 1000
CMD ["python", "-m", "project", "--help"]
