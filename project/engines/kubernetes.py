"""Fills in manifests for one run: an Indexed Job with its service, or a TrainJob. The YAML files here are their templates."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from string import Template

import yaml

from project.doctor.findings import in_bytes
from project.engines.manifest import APP, Wanted
from project.engines.needs import Needs
from project.untrusted import printable

Node = str | int | bool | None | list["Node"] | dict[str, "Node"]
"""What a YAML document is made of."""

_MARGIN = 15  # seconds that the launcher has, after SIGKILL to its ranks, to end itself
_CONFIGS = Path("/config")  # in the container: where configs lie that are not in the image
_GIB = 1 << 30


def written(wanted: Wanted, needs: Needs) -> str:
    """Returns the manifest: documents in YAML, and a comment that describes them."""
    values = _values(wanted, needs)
    documents: list[Node] = []
    if wanted.claim is None:
        documents += _filled("claim.yaml", values)
    if wanted.configs:
        documents += _filled("configs.yaml", values)
    documents += _filled("network.yaml", values)
    documents += _filled("job.yaml" if wanted.engine == "k8s" else "trainjob.yaml", values)
    text = yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120, explicit_start=True, allow_unicode=True)
    return _head(wanted, needs) + str(text)


class _Dumper(yaml.SafeDumper):
    """A YAML dumper that writes texts of several lines as such, and nothing by reference."""

    def ignore_aliases(self, data: object) -> bool:
        return True


_Dumper.add_representer(
    str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)
)


def _filled(file: str, values: Mapping[str, Node]) -> list[Node]:
    """Returns a template's documents with these values in the places that are called `$name`."""
    return [_fill(node, values) for node in yaml.safe_load_all(Path(__file__).with_name(file).read_text())]


def _fill(node: Node, values: Mapping[str, Node]) -> Node:
    """Returns a template with its values: they are put in as they are, whatever they hold.

    A text that is `$name` alone becomes the value, also a list or a mapping; such an item of a list, its items; such a key, its
    keys.
    """
    if isinstance(node, dict):
        filled: dict[str, Node] = {}
        for key, value in node.items():
            if key.startswith("$"):
                entries = values[key[1:]]
                assert isinstance(entries, dict)
                filled |= entries
            else:
                filled[key] = _fill(value, values)
        return filled
    if isinstance(node, list):
        items: list[Node] = []
        for item in node:
            value = _fill(item, values)
            items += value if isinstance(item, str) and isinstance(value, list) else [value]
        return items
    if not isinstance(node, str):
        return node
    return values[node[1:]] if node[:1] == "$" and node[1:] in values else Template(node).substitute(values)


def _head(wanted: Wanted, needs: Needs) -> str:
    elastic = wanted.least < wanted.most
    number = f"{wanted.least} to {wanted.most}" if elastic else str(wanted.most)
    each = f"{wanted.gpus} GPU(s)" if wanted.gpus else "no GPU"
    words = shlex.join(argument.replace("--config=:", "--config=") for argument in wanted.words)
    nodes = f"{wanted.least}:{wanted.most}" if elastic else number
    command = f"--engine {wanted.engine} --nodes {nodes} --gpus {wanted.gpus} --run {wanted.run} {words}"
    lines = (
        f"The run {wanted.run} on {number} pod(s) with {each} each, as",
        f"  python -m project manifest {command.strip()} --image ...",
        "has written it. docs/kubernetes.md says how to start, watch and stop it, and what happens when a pod is lost;",
        f"project/engines/*.yaml say why each line is there. A checkpoint of it takes {in_bytes(needs.checkpoint)}.",
    )
    return "".join("# " + printable(line).replace("\n", "\\n") + "\n" for line in lines)


def _values(wanted: Wanted, needs: Needs) -> dict[str, Node]:
    """Returns what the templates' names stand for."""
    words = [argument.replace("--config=:", f"--config={_CONFIGS}/").replace("$(", "$$(") for argument in wanted.words]
    jobs = wanted.engine == "k8s"
    values: dict[str, Node] = {
        "run": wanted.run,
        "label": {("batch.kubernetes.io/job-name" if jobs else "jobset.sigs.k8s.io/jobset-name"): wanted.run},
        "most": wanted.most,
        "range": f"{wanted.least}:{wanted.most}",
        "image": wanted.image,
        "ranks": wanted.processes,
        "processes": str(wanted.processes),
        "app": str(APP),
        "runs": str(wanted.runs),
        "claim": wanted.claim or f"{wanted.run}-runs",
        "disk": _gib(needs.disk),
        "shm": _gib(needs.shm),
        "grace": needs.grace,
        "shutdown": str(needs.grace - _MARGIN),
        "container": "train" if jobs else "node",  # Kubeflow's name for it
        "words": [*words],
        "files": {**wanted.configs},
        "resources": _resources(wanted, needs),
        "ports": {"ports": [{"name": "rendezvous", "containerPort": 29500}]} if jobs else {},
        "config_mounts": [{"name": "configs", "mountPath": str(_CONFIGS)}] if wanted.configs else [],
        "config_volumes": [{"name": "configs", "configMap": {"name": f"{wanted.run}-configs"}}] if wanted.configs else [],
    }
    # Templates within templates, the inner ones first.
    (values["basics"],) = _filled("container.yaml", values)
    (values["environment"],) = _filled("environment.yaml", values)
    (values["ranks_environment"],) = _filled("ranks.yaml", values) if jobs else [[]]
    (values["policy"],) = _filled("policy.yaml", values)
    (values["pod"],) = _filled("pod.yaml", values)
    return values


def _resources(wanted: Wanted, needs: Needs) -> Node:
    """Returns equal requests and limits: a pod whose memory others may take is the first to be killed."""
    each: dict[str, Node] = {"cpu": str(wanted.cpus), "memory": _gib(needs.memory), "ephemeral-storage": "10Gi"}
    if wanted.gpus:
        each["nvidia.com/gpu"] = str(wanted.gpus)
    return {"requests": each, "limits": each}


def _gib(number: int) -> str:
    return f"{number // _GIB}Gi"
