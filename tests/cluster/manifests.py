"""A manifest's documents, and the Job that comes of them."""

from collections.abc import Mapping
from typing import Any

import yaml

INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def documents(text: str) -> dict[str, dict[str, Any]]:
    """A manifest's, by kind."""
    return {document["kind"]: document for document in yaml.safe_load_all(text) if document}


def job_of(manifest: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The Job that a manifest ends in: its own, or the one that Kubeflow and JobSet make of a TrainJob."""
    if "Job" in manifest:
        return dict(manifest["Job"])
    trainjob, (replicated,) = manifest["TrainJob"], manifest["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
    name, trainer = trainjob["metadata"]["name"], trainjob["spec"]["trainer"]
    spec = replicated["template"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = [container for container in pod["containers"] if container["name"] == "node"]
    container |= {key: trainer[key] for key in ("image", "command", "args")}
    variables = {
        "PET_NNODES": str(trainer["numNodes"]),
        "PET_NPROC_PER_NODE": str(trainer.get("numProcPerNode", "auto")),
        "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
        "PET_MASTER_PORT": "29500",
    }
    container["env"] += [{"name": key, "value": value} for key, value in variables.items()]
    container["env"].append({"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": INDEX}}})
    pod["subdomain"] = name
    spec |= {"completionMode": "Indexed", "completions": trainer["numNodes"], "parallelism": trainer["numNodes"]}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": f"{name}-node-0"}, "spec": spec}
