"""What an API server would say of a manifest: the schemas of Kubernetes, a cut-down one of Kubeflow's, and rules of its own
that no schema has.
"""

import copy
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

from tests.cluster.manifests import job_of

VERSIONS = ("1.32", "1.36")
_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
_FIELDS = ("metadata.annotations['batch.kubernetes.io/job-completion-index']", "spec.nodeName", "metadata.name")


def _object(required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "required": required.split(), "properties": properties}


_TEXT, _TEXTS, _ANY = {"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "object"}
_RUNTIMES = ("TrainingRuntime", "ClusterTrainingRuntime")
_COUNT = {"type": "integer", "minimum": 1}
_METADATA = _object("name", name=_TEXT, labels={"type": "object", "additionalProperties": _TEXT})
_LABELS = _object("labels", labels={"type": "object", "additionalProperties": _TEXT})
# Of trainer.kubeflow.org/v1alpha1, what our manifests use; pods and Jobs in it are looked at by themselves.
_KUBEFLOW = {
    "TrainJob": _object(
        "apiVersion kind metadata spec",
        apiVersion={"const": "trainer.kubeflow.org/v1alpha1"},
        kind=_TEXT,
        metadata=_METADATA,
        spec=_object(
            "runtimeRef trainer",
            runtimeRef=_object("name", apiGroup=_TEXT, kind={"enum": list(_RUNTIMES)}, name=_TEXT),
            trainer=_object(
                "",
                image=_TEXT,
                command=_TEXTS,
                args=_TEXTS,
                env={"type": "array"},
                numNodes=_COUNT,
                numProcPerNode=_COUNT,
                resourcesPerNode=_object("", requests=_ANY, limits=_ANY),
            ),
            suspend={"type": "boolean"},
            activeDeadlineSeconds=_COUNT,
        ),
    ),
    "TrainingRuntime": _object(
        "apiVersion kind metadata spec",
        apiVersion={"const": "trainer.kubeflow.org/v1alpha1"},
        kind=_TEXT,
        metadata=_METADATA,
        spec=_object(
            "template",
            mlPolicy=_object("", numNodes=_COUNT, torch=_object("")),
            template=_object(
                "spec",
                spec=_object(
                    "replicatedJobs",
                    replicatedJobs={
                        "type": "array",
                        "maxItems": 1,
                        "items": _object(
                            "name template", name={"const": "node"}, replicas={"const": 1},
                            template=_object("spec", metadata=_LABELS, spec=_ANY),
                        ),
                    },
                ),
            ),
        ),
    ),
}  # fmt: skip


def problems(text: str) -> list[str]:
    """All of them, each in a line; of a manifest that is right, none."""
    found = [one for one in yaml.safe_load_all(text) if one]
    kinds = {one["kind"]: one for one in found}
    said = [line for one in found for line in _schemas(one)]
    if said:
        return said
    if "TrainJob" in kinds:
        if said := list(_kubeflow(kinds)):
            return said
        job = job_of(copy.deepcopy(kinds))
        said += list(_schemas(job))
    else:
        job = kinds["Job"]
        said += _meets(job, kinds)
    return [*said, *_names(found), *_rules(job), *_pod(job["spec"]["template"]["spec"], kinds)]


def _schemas(document: dict[str, Any]) -> Iterator[str]:
    if document["kind"] in _KUBEFLOW:
        for error in jsonschema.Draft202012Validator(_KUBEFLOW[document["kind"]]).iter_errors(document):
            yield f"{document['kind']}: {error.json_path}: {error.message}"
        return
    for version in VERSIONS:
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            yield f"{document['kind']} ({version}): {error}"


def _names(found: list[dict[str, Any]]) -> Iterator[str]:
    for one in found:
        if not _LABEL.fullmatch(one["metadata"]["name"]):
            yield f"{one['kind']}: {one['metadata']['name']} is no DNS label"


def _kubeflow(kinds: dict[str, dict[str, Any]]) -> Iterator[str]:
    job, runtime = kinds["TrainJob"]["spec"], kinds["TrainingRuntime"]
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    if node["template"].get("metadata", {}).get("labels", {}).get("trainer.kubeflow.org/trainjob-ancestor-step") != "trainer":
        yield "TrainingRuntime: no job is the trainer's"
    if [one["name"] for one in node["template"]["spec"]["template"]["spec"]["containers"]] != ["node"]:
        yield "TrainingRuntime: the trainer's container is called node"
    if (job["runtimeRef"]["kind"], job["runtimeRef"]["name"]) != ("TrainingRuntime", runtime["metadata"]["name"]):
        yield "TrainJob: its runtimeRef names another runtime"
    # Kubeflow sets these itself, and refuses them in the TrainJob.
    containers = node["template"]["spec"]["template"]["spec"]["containers"]
    given = [*job["trainer"].get("env", ()), *(one for container in containers for one in container.get("env", ()))]
    yield from (f"TrainJob: {one['name']} is reserved" for one in given if one["name"].startswith("PET_"))
    resources = job["trainer"].get("resourcesPerNode", {})
    if "nvidia.com/gpu" not in resources.get("limits", {}) and "numProcPerNode" not in job["trainer"]:
        yield "TrainJob: without numProcPerNode, a process for each core"


def _meets(job: dict[str, Any], kinds: dict[str, dict[str, Any]]) -> Iterator[str]:
    service, pod = kinds["Service"], job["spec"]["template"]["spec"]
    name = job["metadata"]["name"]
    if service["spec"].get("selector") != {"batch.kubernetes.io/job-name": name}:
        yield "Service: its selector finds no pod of the Job"
    if service["spec"].get("clusterIP") != "None" or not service["spec"].get("publishNotReadyAddresses"):
        yield "Service: it gives no names to pods that are about to start"
    if pod.get("subdomain") != service["metadata"]["name"]:
        yield "Job: subdomain is not the service"
    values = {one["name"]: one.get("value") for one in pod["containers"][0]["env"]}
    if values["MASTER_ADDR"] != f"{name}-0.{service['metadata']['name']}":
        yield "Job: MASTER_ADDR is not its first pod"
    least, most = map(int, values["NNODES"].split(":"))
    if not least <= most == job["spec"]["completions"] == job["spec"]["parallelism"]:
        yield "Job: NNODES, completions and parallelism are not of one number"


def _rules(job: dict[str, Any]) -> Iterator[str]:
    """What is checked when a Job is created (pkg/apis/batch/validation of Kubernetes)."""
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    indexed, by_index = spec.get("completionMode") == "Indexed", "backoffLimitPerIndex" in spec
    if pod.get("restartPolicy") not in ("Never", "OnFailure"):
        yield "Job: restartPolicy must be Never or OnFailure"
    if "podFailurePolicy" in spec and pod.get("restartPolicy") != "Never":
        yield "Job: podFailurePolicy takes restartPolicy Never"
    if "podFailurePolicy" in spec and spec.get("podReplacementPolicy", "Failed") != "Failed":
        yield "Job: podFailurePolicy takes podReplacementPolicy Failed"
    if by_index and (not indexed or pod.get("restartPolicy") != "Never"):
        yield "Job: backoffLimitPerIndex takes Indexed, and restartPolicy Never"
    if "maxFailedIndexes" in spec and not (by_index and spec["maxFailedIndexes"] <= spec["completions"]):
        yield "Job: maxFailedIndexes takes backoffLimitPerIndex, and is no more than completions"
    names = [one["name"] for one in (*pod.get("initContainers", ()), *pod["containers"])]
    for rule in spec.get("podFailurePolicy", {}).get("rules", ()):
        if ("onExitCodes" in rule) == ("onPodConditions" in rule):
            yield "Job: a rule is about exit codes or about conditions"
        codes = rule.get("onExitCodes", {})
        values = codes.get("values", [1])
        if values != sorted(set(values)) or (codes.get("operator") == "In" and 0 in values):
            yield f"Job: exit codes {values} are not in order, or 0 is one"
        if codes.get("containerName", names[-1]) not in names:
            yield f"Job: a rule names the container {codes['containerName']}, which is not there"
        if rule["action"] not in ("FailJob", "FailIndex", "Ignore", "Count"):
            yield f"Job: there is no action {rule['action']}"
        if rule["action"] == "FailIndex" and not by_index:
            yield "Job: FailIndex takes backoffLimitPerIndex"
    for rule in spec.get("successPolicy", {}).get("rules", ()):
        if not indexed or int(rule["succeededIndexes"]) >= spec["completions"]:
            yield "Job: successPolicy names a pod that there is not"
    if not _LABEL.fullmatch(f"{job['metadata']['name']}-{spec['completions'] - 1}"):
        yield "Job: its pods' names are no DNS labels"


def _pod(pod: dict[str, Any], kinds: dict[str, dict[str, Any]]) -> Iterator[str]:
    containers = [*pod.get("initContainers", ()), *pod["containers"]]
    volumes = [one["name"] for one in pod["volumes"]]
    if len(set(volumes)) < len(volumes) or len({one["name"] for one in containers}) < len(containers):
        yield "pod: a name is there twice"
    for one in pod["volumes"]:
        if (name := one.get("configMap", {}).get("name")) and name != kinds.get("ConfigMap", {}).get("metadata", {}).get(
            "name"
        ):
            yield f"pod: there is no ConfigMap {name}"
    for container in containers:
        mounts = container["volumeMounts"]
        yield from (f"pod: there is no volume {one['name']}" for one in mounts if one["name"] not in volumes)
        if len({one["mountPath"] for one in mounts}) < len(mounts):
            yield "pod: two volumes at one place"
        variables = {one["name"]: one for one in container["env"]}
        if len(variables) < len(container["env"]):
            yield f"pod: a variable of {container['name']} is there twice"
        for one in variables.values():
            if ("value" in one) == ("valueFrom" in one):
                yield f"pod: {one['name']} has a value or a source"
            path = one.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", _FIELDS[0])
            if path not in _FIELDS:
                yield f"pod: there is no field {path}"
        for word in (*container["command"], *container.get("args", ())):
            for name in re.findall(r"(?<!\$)\$\((\w+)\)", word):
                if name not in variables:
                    yield f"pod: $({name}) is no variable of {container['name']}"
        stop = int(variables.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", {"value": "0"})["value"])
        if stop >= pod["terminationGracePeriodSeconds"]:
            yield "pod: the launcher waits longer than the kubelet"
        resources = container["resources"]
        if resources["requests"].get("nvidia.com/gpu") != resources["limits"].get("nvidia.com/gpu"):
            yield "pod: GPUs are asked for as they are allowed"
