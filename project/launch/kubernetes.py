"""Fills in manifests for one run: an Indexed Job with its service, or a TrainJob. The YAML files here are their templates."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml
from lightning.pytorch import LightningDataModule, LightningModule

from project.doctor.examined import examined_run
from project.errors import UserError
from project.launch.manifest import (
    APP,
    Engine,
    Needs,
    Wanted,
    claim_of,
    image_of,
    name,
    needs,
    pods,
    refuse_odd_batches,
    root_of,
)
from project.typed import TypedTrainer

_MARGIN = 15  # seconds that the launcher has, after SIGKILL to its ranks, to end itself
_CONFIGS = Path("/config")  # in the container: where configs lie that are not in the image
_HEAD = """\
# Written by python -m project manifest. docs/kubernetes.md says how to start, watch and stop it, and what happens when a pod is
# lost; project/launch/*.yaml say why each line is there.
"""
_KUBEFLOWS = ("NNODES", "NODE_RANK", "MASTER_ADDR", "NPROC_PER_NODE", "MAX_RESTARTS")  # variables that Kubeflow sets itself


def manifest(
    trainer: TypedTrainer,
    model: LightningModule,
    datamodule: LightningDataModule | None = None,
    engine: Engine = "k8s",
    nodes: str = "1",
    gpus: int = 8,
    cpus: int | None = None,
    image: str | None = None,
    claim: str | None = None,
    out: Path | None = None,
    run: str = "run",
    words: Sequence[str] = (),
    configs: Mapping[str, str] | None = None,
) -> str:
    """Writes a manifest for Kubernetes that fits this run: its memory, disk, /dev/shm and grace. Nothing is started.

    Args:
        trainer: the Trainer of the run.
        model: the model of the run.
        datamodule: its data; where it is not here, some figures are guessed.
        engine: 'k8s', a Job and a service, or 'trainjob', for Kubeflow Trainer v2.
        nodes: pods, one a node; MIN:MAX goes on while at least MIN are there.
        gpus: of each pod; 0 trains on the CPU, with one process a pod.
        cpus: cores of each pod; None: 8 for each GPU, or 4.
        image: the image with its digest, REPOSITORY@sha256:DIGEST.
        claim: an existing volume claim for the runs; None writes one of the size that the checkpoints take.
        out: the file to write; None: it is printed.
        run: the run's name, and that of all that the manifest makes.
        words: after `python -m project fit`, in the container.
        configs: those that are not in the image, by name.
    """
    if gpus < 0 or (cpus is not None and cpus < 1):
        raise UserError(f"--gpus {gpus} --cpus {cpus}: these are numbers of a pod. HINT: --gpus 0 is none.")
    cores = cpus or (8 * gpus or 4)
    root = root_of(trainer.configuration.get("trainer", {}).get("default_root_dir"))
    wanted = Wanted(
        *(engine, name(run), *pods(nodes, engine), gpus, cores, image_of(image), claim_of(claim)),
        list(words),
        dict(configs or {}),
        root,
    )
    spare = max(1, cores // wanted.processes) - 1
    with examined_run(trainer, model, datamodule, Path(trainer.default_root_dir), wanted.processes, spare) as examined:
        needed = needs(examined, wanted)
        refuse_odd_batches(wanted, examined)
    text = written(wanted, needed)
    if out is not None:
        out.write_text(text)
    return text


class _Dumper(yaml.SafeDumper):
    """A YAML dumper that writes texts of several lines as such, and nothing by reference."""

    def ignore_aliases(self, data: object) -> bool:
        return True


_Dumper.add_representer(
    str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)
)


def _loader(values: Mapping[str, object]) -> type[yaml.SafeLoader]:
    """Returns a YAML loader that reads a value where a template has its `$name`: as it is, whatever it holds."""

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor(
        "tag:yaml.org,2002:str", lambda _, node: values[node.value[1:]] if node.value.startswith("$") else node.value
    )
    return Loader


def written(wanted: Wanted, needed: Needs) -> str:
    """Returns the manifest: documents in YAML, after a comment."""
    jobs, values, folder = wanted.engine == "k8s", _values(wanted, needed), Path(__file__).parent
    job = yaml.load((folder / "job.yaml").read_text(), _loader(values))
    pod = job["template"]["spec"]
    (train,) = pod["containers"]
    if jobs:
        job |= {"completionMode": "Indexed", "completions": wanted.most, "parallelism": wanted.most}
        pod["subdomain"] = wanted.run
        train["ports"] = [{"name": "rendezvous", "containerPort": 29500}]
    else:
        train["env"] = {name: value for name, value in train["env"].items() if name not in _KUBEFLOWS}
    for container in (*pod["initContainers"], train):
        container["env"] = [
            {"name": name, "value" if isinstance(value, str) else "valueFrom": value}
            for name, value in container["env"].items()
        ]  # fmt: skip
    kinds = {"NetworkPolicy", *(("Service", "Job") if jobs else ("TrainingRuntime", "TrainJob"))}
    kinds |= {"ConfigMap"} if wanted.configs else set()
    kinds |= {"PersistentVolumeClaim"} if wanted.claim is None else set()
    templates = yaml.load_all((folder / "manifest.yaml").read_text(), _loader({**values, "job": job}))
    documents = [document for document in templates if document["kind"] in kinds]
    text = yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120, explicit_start=True, allow_unicode=True)
    return _HEAD + str(text)


def _values(wanted: Wanted, needed: Needs) -> dict[str, object]:
    """Returns what the templates' names stand for."""
    run, jobs = wanted.run, wanted.engine == "k8s"
    words = [argument.replace("--config=:", f"--config={_CONFIGS}/").replace("$(", "$$(") for argument in wanted.words]
    # Requests equal limits: a pod whose memory others may take is the first to be killed.
    limits = {"cpu": str(wanted.cpus), "memory": _gib(needed.memory), "ephemeral-storage": "10Gi"}
    limits |= {"nvidia.com/gpu": str(wanted.gpus)} if wanted.gpus else {}
    claim, configs = wanted.claim or f"{run}-runs", f"{run}-configs"
    # By name: where it is mounted, and what it is. Loaders' workers and NCCL share /dev/shm, which counts as memory; a
    # container's own has 64 MB. The root is read-only: what libraries write for themselves, compilers say, goes to /tmp.
    volumes: dict[str, tuple[str, dict[str, object]]] = {
        "runs": (str(wanted.runs), {"persistentVolumeClaim": {"claimName": claim}}),
        "shm": ("/dev/shm", {"emptyDir": {"medium": "Memory", "sizeLimit": _gib(needed.shm)}}),
        "tmp": ("/tmp", {"emptyDir": {"sizeLimit": "8Gi"}}),  # a pod that writes more is ended
    }
    if wanted.configs:
        volumes["configs"] = (str(_CONFIGS), {"configMap": {"name": configs}})
    return {
        **{"run": run, "most": wanted.most, "range": f"{wanted.least}:{wanted.most}", "image": wanted.image, "app": str(APP)},
        **{"ranks": wanted.processes, "processes": str(wanted.processes), "master": f"{run}-0.{run}"},
        "label": {("batch.kubernetes.io/job-name" if jobs else "jobset.sigs.k8s.io/jobset-name"): run},
        "container": "train" if jobs else "node",  # Kubeflow's name for it
        **{"claim": claim, "disk": _gib(needed.disk), "configs": configs, "files": wanted.configs},
        **{"grace": needed.grace, "shutdown": str(needed.grace - _MARGIN)},
        "fit": ["fit", *words, f"--run={run}"],
        "doctor": [
            *("doctor", *words, "--fast=true", f"--trainer.default_root_dir={wanted.runs}/.doctor"),
            f"--run={run}-$(POD_INDEX)",
        ],
        "resources": {"requests": limits, "limits": limits},
        "mounts": [{"name": name, "mountPath": path} for name, (path, _) in volumes.items()],
        "volumes": [{"name": name, **source} for name, (_, source) in volumes.items()],
    }


def _gib(number: int) -> str:
    return f"{number >> 30}Gi"
