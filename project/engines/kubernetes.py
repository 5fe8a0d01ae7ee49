"""Manifests: an Indexed Job with its service, or a TrainJob, filled in for one run. The texts are the YAML files here."""

import json
import shlex
from pathlib import Path
from string import Template
from textwrap import indent

from project.doctor.findings import in_bytes
from project.engines.manifest import APP, Wanted
from project.engines.needs import Needs

_MARGIN = 15  # seconds that the launcher has, after SIGKILL to its ranks, to end itself
_CONFIGS = Path("/config")  # in the container: where configs lie that are not in the image
_GIB = 1 << 30


def written(wanted: Wanted, needs: Needs) -> str:
    """The manifest, as text with comments."""
    documents = [_head(wanted)]
    if wanted.claim is None:
        documents.append(_claim(wanted, needs))
    if wanted.configs:
        documents.append(_config_map(wanted))
    label = "batch.kubernetes.io/job-name" if wanted.engine == "k8s" else "jobset.sigs.k8s.io/jobset-name"
    documents.append(_filled("network.yaml", run=wanted.run, label=f"{label}: {wanted.run}"))
    policy = _filled("policy.yaml", container=_container(wanted))
    words = _words(wanted)
    common = {"run": wanted.run, "most": wanted.most, "image": wanted.image, "processes": wanted.processes}
    if wanted.engine == "k8s":
        job = _filled("job.yaml", policy=indent(policy, " " * 2), pod=indent(_pod(wanted, needs), " " * 6), **common)
        documents.append(job)
    else:
        job = _filled(
            "trainjob.yaml",
            policy=indent(policy, " " * 14),
            pod=indent(_pod(wanted, needs), " " * 18),
            job_words=_list(words, 6),
            job_resources=indent(_resources(wanted, needs), " " * 6),
            **common,
        )
        documents.append(job)
    return "---\n".join(documents)


def _filled(file: str, **values: object) -> str:
    text = Template(Path(__file__).with_name(file).read_text()).substitute(values)
    return "".join(f"{line}\n" for line in text.splitlines() if line.strip())


def _head(wanted: Wanted) -> str:
    elastic = wanted.least < wanted.most
    number = f"{wanted.least} to {wanted.most}" if elastic else str(wanted.most)
    each = f"{wanted.gpus} GPU(s)" if wanted.gpus else "no GPU"
    words = [word.replace("--config=:", "--config=") for word in wanted.words]
    nodes = f"{wanted.least}:{wanted.most}" if elastic else number
    given = f"--engine {wanted.engine} --nodes {nodes} --gpus {wanted.gpus} --run {wanted.run} {shlex.join(words)}"
    return (
        f"# The run {wanted.run} on {number} pod(s) with {each} each, as\n"
        f"#   python -m project manifest {given.strip()} --image ...\n"
        "# has written it. docs/kubernetes.md says how to start, watch and stop it, and what happens when a pod is lost.\n"
    )


def _container(wanted: Wanted) -> str:
    return "train" if wanted.engine == "k8s" else "node"  # Kubeflow's name for it


def _claim_name(wanted: Wanted) -> str:
    return wanted.claim or f"{wanted.run}-runs"


def _claim(wanted: Wanted, needs: Needs) -> str:
    return (
        "# The folder of the runs, which all pods write to: a storage class that can ReadWriteMany (NFS, CephFS, Lustre).\n"
        "# With --claim NAME an existing one is taken, and this is left out.\n"
        "apiVersion: v1\n"
        "kind: PersistentVolumeClaim\n"
        f"metadata:\n  name: {_claim_name(wanted)}\n"
        "spec:\n"
        "  accessModes: [ReadWriteMany]\n"
        f"  resources:\n    requests:\n      storage: {_gib(needs.disk)}\n"
    )


def _config_map(wanted: Wanted) -> str:
    files = "".join(f"{json.dumps(name)}: |2\n{indent(text.rstrip(), '  ')}\n" for name, text in wanted.configs.items())
    return (
        "# Configs that are not in the image.\n"
        "apiVersion: v1\n"
        f"kind: ConfigMap\nmetadata:\n  name: {wanted.run}-configs\ndata:\n{indent(files, '  ')}"
    )


def _words(wanted: Wanted) -> list[str]:
    """Of fit and of the doctor, with the configs where they lie in the container."""
    return [word.replace("--config=:", f"--config={_CONFIGS}/") for word in wanted.words]


def _pod(wanted: Wanted, needs: Needs) -> str:
    within = indent(_resources(wanted, needs), " " * 6).replace("      ", "    resources:\n      ", 1)
    own, ports = _own_environment(wanted), ""
    if wanted.engine == "k8s":
        ports = "    ports:\n      - name: rendezvous\n        containerPort: 29500\n"
    return _filled(
        "pod.yaml",
        container=_container(wanted),
        checkpoint=in_bytes(needs.checkpoint),
        grace=needs.grace,
        shutdown=needs.grace - _MARGIN,
        image=wanted.image,
        app=APP,
        run=wanted.run,
        runs=wanted.runs,
        processes=wanted.processes,
        claim=_claim_name(wanted),
        shm=_gib(needs.shm),
        doctor_words=_list(_words(wanted), 6),
        words=_list(_words(wanted), 6),
        own_env=own,
        env=_environment(wanted),
        ports=ports,
        within=within + _SECURITY + _mounts(wanted),
        volumes=f"  - name: configs\n    configMap:\n      name: {wanted.run}-configs\n" if wanted.configs else "",
    )


_SECURITY = """\
    securityContext:
      allowPrivilegeEscalation: false
      readOnlyRootFilesystem: true
      capabilities:
        drop: [ALL]
"""


def _own_environment(wanted: Wanted) -> str:
    """Who is who, where Kubeflow does not say it."""
    if wanted.engine == "trainjob":
        return ""
    return f"""\
      - name: NNODES            # MIN:MAX has the launchers meet again when a pod is lost or comes
        value: "{wanted.least}:{wanted.most}"
      - name: NODE_RANK
        valueFrom:
          fieldRef:
            fieldPath: metadata.annotations['batch.kubernetes.io/job-completion-index']
      - name: MASTER_ADDR
        value: {wanted.run}-0.{wanted.run}
      - name: NPROC_PER_NODE
        value: "{wanted.processes}"
      - name: MAX_RESTARTS      # within a pod; then it ends with the code of its last failure
        value: "3"
"""


def _environment(wanted: Wanted) -> str:
    """What both containers have."""
    return f"""\
      - name: PROJECT_PYTHON
        value: python
      - name: PROJECT_IMAGE     # it is recorded in the run's configuration
        value: {wanted.image}
      - name: PROJECT_NODE      # errors name it
        valueFrom:
          fieldRef:
            fieldPath: spec.nodeName
      - name: HOME
        value: /tmp
"""


def _resources(wanted: Wanted, needs: Needs) -> str:
    """As much is asked for as is allowed: a pod that others may take memory from is the first to be killed."""
    lines = [f'cpu: "{wanted.cpus}"', f"memory: {_gib(needs.memory)}"]
    if wanted.gpus:
        lines.append(f'nvidia.com/gpu: "{wanted.gpus}"')
    part = "".join(f"  {line}\n" for line in lines)
    return f"requests:\n{part}limits:\n{part}"


def _mounts(wanted: Wanted) -> str:
    places = {"runs": wanted.runs, "shm": Path("/dev/shm"), "tmp": Path("/tmp")}
    if wanted.configs:
        places["configs"] = _CONFIGS
    return "    volumeMounts:\n" + "".join(
        f"      - name: {name}\n        mountPath: {place}\n" for name, place in places.items()
    )


def _list(words: list[str], depth: int) -> str:
    """A word is quoted where YAML would take it for something else. `$(` is Kubernetes' own."""
    escaped = [word.replace("$(", "$$(") for word in words]
    plain = [one if one[:2] == "--" and not set(one) & set(":#{}[],&*!|>'\"%@` \n") else json.dumps(one) for one in escaped]
    return "".join(f"{' ' * depth}- {one}\n" for one in plain)


def _gib(number: int) -> str:
    return f"{number // _GIB}Gi"
