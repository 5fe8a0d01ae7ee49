"""python -m project manifest: what it writes fits the run and passes an API server's checks, and what can't work is refused."""

import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from project.errors import UserError
from project.launch.kubernetes import written
from project.launch.manifest import Needs, Wanted, claim_of, command, image_of, name, pods, root_of
from tests.cluster.manifests import documents, job_of
from tests.conftest import ROOT, Run, forked

IMAGE = "registry.example/project@sha256:" + "0" * 64
DDP = ("--config=configs/ddp.yaml", "--run=train", "--gpus=4")
FILES = {
    "job.yaml": (*DDP, "--engine=k8s", "--nodes=1:2"),
    "trainjob.yaml": (*DDP, "--engine=trainjob", "--nodes=2"),
}
MIB = 1 << 20


@cache
def made(folder: Path, *words: str) -> Run:
    """What the verb does in a folder; its output has what it prints and what it says."""
    return forked(folder, "manifest", *words, f"--image={IMAGE}", "--out=out.yaml")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("manifests")


def text(folder: Path, *words: str) -> str:
    place = folder / "out.yaml"
    run = made(folder, *words)
    assert run.code == 0, run.output
    kept = folder / f"{abs(hash(words))}.yaml"
    if place.exists():
        place.replace(kept)
    return kept.read_text()


@pytest.mark.parametrize("file", FILES)
def test_what_lies_in_scripts_is_what_the_verb_writes(folder, file):
    """So there is one source; `python -m tests.engines.test_manifest` writes them anew."""
    assert (ROOT / "scripts/k8s" / file).read_text() == text(folder, *FILES[file])


def test_a_pipe_can_be_named_for_it(tmp_path):
    """It is written to, and not put in another file's place: as root that would replace /dev/stdout."""
    os.mkfifo(pipe := tmp_path / "pipe")
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    run = forked(tmp_path, "manifest", *FILES["job.yaml"], f"--image={IMAGE}", f"--out={pipe}")
    assert run.code == 0, run.output
    assert pipe.is_fifo()
    assert os.read(reading, 1 << 16).decode() == (ROOT / "scripts/k8s/job.yaml").read_text()
    os.close(reading)


def container(kinds: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return dict(job_of(kinds)["spec"]["template"]["spec"]["containers"][0])


def test_a_yaml_for_gpus_and_a_config_of_ones_own_need_neither_here(tmp_path):
    """The words go to the container as they are, and so does the config, which is not in the image."""
    (tmp_path / "mine.yaml").write_text(
        "base: configs/ddp.yaml  # a comment\ntrainer: {accelerator: gpu, devices: 8, num_nodes: 9}\n"
    )
    odd = '--trainer.callbacks=[{"class_path": "tests.probes.Ledger"}]'
    words = [*["--config", "mine.yaml", "--run", "nightly", "--nodes", "2", "--gpus=4", "--data.num_workers=2"], odd]
    words += ["--trainer.default_root_dir", "/data"]
    run = forked(tmp_path, "manifest", *words, "--image", IMAGE)
    assert run.code == 0, run.output
    assert not (tmp_path / "lightning_logs").exists()
    kinds = documents(run.output[run.output.index("# Written by") :])
    train = container(kinds)
    assert train["args"] == [
        *("fit", "--config=configs/ddp.yaml", "--config=/config/mine.yaml", "--data.num_workers=2", odd),
        *("--trainer.default_root_dir", "/data", "--run=nightly"),
    ]
    assert {"name": "runs", "mountPath": "/data/lightning_logs"} in train["volumeMounts"]
    assert kinds["ConfigMap"]["data"]["mine.yaml"] == (tmp_path / "mine.yaml").read_text()
    assert train["resources"]["limits"]["nvidia.com/gpu"] == "4"
    values = {variable["name"]: variable.get("value") for variable in train["env"]}
    assert values["NNODES"] == "2:2"
    assert values["NPROC_PER_NODE"] == "4"
    assert values["PROJECT_IMAGE"] == IMAGE


def _gib(quantity: str) -> int:
    return int(quantity.removesuffix("Gi"))


def test_memory_disk_shm_and_grace_follow_from_the_run(folder, tmp_path):
    """A network of 100 million parameters, in 4 bytes each: a checkpoint with Adam is 1.2 GB; workers hold 224-pixel images."""
    large = ("--model.network=torchvision.models.vit_b_16", "--model.network.num_classes=10", "--checkpoints.keep_last=9")
    images = ("--data.source.init_args.image_size=224", "--data.batch_size=32", "--data.global_batch_size=1024")
    few = ("--data.source.init_args.train_size=4096", "--data.source.init_args.val_size=8")
    words = ("--config=configs/ddp.yaml", "--run=large", "--nodes=4", "--gpus=8", *large, *images, *few)
    small, big = documents(text(folder, *FILES["job.yaml"])), documents(text(tmp_path, *words))

    def figures(of: dict[str, dict[str, Any]]) -> tuple[int, int, int, int]:
        pod = job_of(of)["spec"]["template"]["spec"]
        (shm,) = [volume["emptyDir"]["sizeLimit"] for volume in pod["volumes"] if volume["name"] == "shm"]
        claim = of["PersistentVolumeClaim"]["spec"]["resources"]["requests"]["storage"]
        memory = pod["containers"][0]["resources"]["limits"]["memory"]
        return _gib(claim), _gib(shm), _gib(memory), pod["terminationGracePeriodSeconds"]

    disk, shm, memory, grace = figures(big)
    least = figures(small)
    # The doctor asks for 11 checkpoints of weights and as much again for the optimiser: 86 M x 8 B x 11 = 7.0 GiB.
    assert 14 <= disk <= 18
    # And for 32 images x 7 workers x 2 x 8 processes x 150,528 bytes (uint8) or four times that: 0.5 GiB or 2.0.
    assert 2 <= shm <= 6
    assert 60 <= memory <= 120  # 8 ranks of 4 GiB, 56 workers of half a GiB, /dev/shm, a checkpoint, and a quarter more
    assert 90 < grace <= 150
    assert least < (disk, shm, memory, grace)


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (
            ("--nodes=3",),
            "3 pod(s) of 4 process(es) with micro-batches of 16 can't make a global batch of 128; --nodes of 1, 2 can",
        ),
        (("--nodes=1:4",), "3 or 4 pod(s) of 4 process(es)"),
        (("--nodes=2", "--run=Nightly_1"), "HINT: --run nightly-1"),
    ],
)
def test_what_can_not_work_is_refused_by_name(tmp_path, words, cause):
    run = forked(tmp_path, "manifest", *DDP, *words, f"--image={IMAGE}", "--out=out.yaml")
    assert run.code == 2
    assert cause in run.output
    assert "Traceback" not in run.output
    assert not (tmp_path / "out.yaml").exists()


def test_numbers_of_pods_names_and_images_are_looked_at(caplog):
    assert pods("4", "trainjob") == (4, 4)
    assert pods("2:4", "k8s") == (2, 4)
    for odd in ("0", "4:2", "two", "2:", "-1"):
        with pytest.raises(UserError, match="a number of pods"):
            pods(odd, "k8s")
    with pytest.raises(UserError, match="fixed"):
        pods("2:4", "trainjob")
    for odd in ("1st", "a.b", "-a", "a-", "a" * 49, ""):
        with pytest.raises(UserError, match="can't be that of a Kubernetes service"):
            name(odd)
    assert image_of(IMAGE) == IMAGE
    assert not caplog.records
    assert image_of("host:5000/team/project:1") == "host:5000/team/project:1"
    assert "no digest" in caplog.text
    for odd in (None, "", "two words", "project@sha256:12"):
        with pytest.raises(UserError, match="image"):
            image_of(odd)
    with pytest.raises(UserError, match="which image") as refused:
        image_of(None)
    (page,) = re.findall(r"docs/\w+\.md", str(refused.value))
    assert "docker build" in (ROOT / page).read_text()  # it says how to build one


@pytest.mark.parametrize("engine", ["k8s", "trainjob"])
def test_what_a_user_writes_is_a_value_whatever_it_holds(engine):
    """The words and configs are put in as values: none of them can end one and begin another key, container or document."""
    odd = "--x=a: b\n- name: other\n---\nkind: Pod $(HOME) ${run} $run # \"'\x1b[31m"
    configs = {"mine.yaml": "# it's mine\nbase: x  \n---\n\tkind: Pod\n", "empty.yaml": ""}
    image = "host/image@sha256:" + "0" * 64
    wanted = Wanted(engine, "train", 1, 1, 0, 4, image, "mine", ["--config=:mine.yaml", odd], configs, root_of("/data"))
    manifest = written(wanted, Needs(1 << 30, 1 << 30, 1 << 30, 120))
    assert "\x1b" not in manifest
    kinds = documents(manifest)
    jobs = ["Service", "Job"] if engine == "k8s" else ["TrainingRuntime", "TrainJob"]
    assert list(kinds) == ["ConfigMap", "NetworkPolicy", *jobs]
    assert kinds["ConfigMap"]["data"] == configs
    assert container(kinds)["args"] == ["fit", "--config=/config/mine.yaml", odd.replace("$(", "$$("), "--run=train"]
    assert schema_errors(manifest) == []
    check_job(documents(manifest))


def test_names_of_claims_and_folders_are_looked_at():
    assert claim_of(None) is None
    assert claim_of("team.runs-1") == "team.runs-1"
    for odd in ("", "-a", "Runs", "a: b", "a\nkind: Pod", "a" * 254):
        with pytest.raises(UserError, match="no claim"):
            claim_of(odd)
    assert str(root_of(None)) == "/app"
    assert str(root_of("/data/runs_1")) == "/data/runs_1"
    for odd in ("../other", "/data/../../etc", "/a:b", "/a\nb", "/ä", "/a b"):
        with pytest.raises(UserError, match="no volume"):
            root_of(odd)


def test_the_container_gets_the_words_but_for_the_manifests_own(tmp_path):
    config, base = tmp_path / "mine.yaml", tmp_path / "other.yaml"
    base.write_text("seed_everything: 1\n")
    config.write_text("base: other.yaml\n")
    argv = f"--nodes 2 --config {base} --config {config} --out=x --gpus=8 --trainer.max_epochs 3 --run a --data.flip=true"
    words, configs = command(argv.split())
    assert words == ["--config=:other.yaml", "--config=:mine.yaml", "--trainer.max_epochs", "3", "--data.flip=true"]
    assert set(configs) == {"mine.yaml", "other.yaml"}
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/other.yaml").write_text("seed_everything: 1\n")
    config.write_text("base: sub/other.yaml\n")
    with pytest.raises(UserError, match="in one folder"):
        command(["--config", str(config)])


# What Kubernetes makes of it --------------------------------------------------------------------------------------------


def schema_errors(manifest: str) -> list[str]:
    """Returns what the schemas of Kubernetes 1.32 and 1.36 object to; a TrainJob counts as the Job that comes of it."""
    validate = pytest.importorskip("kubernetes_validate", reason="no schemas of Kubernetes: scripts/setup test-all")
    kinds = documents(manifest)
    plain = [document for kind, document in kinds.items() if kind not in ("Job", "TrainJob", "TrainingRuntime")]
    errors = []
    for document in (job_of(kinds), *plain):
        for version in ("1.32", "1.36"):
            try:
                validate.validate(document, version, strict=True)
            except validate.ValidationError as error:
                errors.append(f"{document['kind']} ({version}): {error}")
    return errors


def check_job(kinds: dict[str, dict[str, Any]]) -> None:
    """Asserts what no schema has: the parts of a manifest name each other."""
    job = job_of(kinds)
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    containers = [*pod["initContainers"], *pod["containers"]]
    for rule in spec["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes", {"values": [1]})
        assert codes["values"] == sorted(set(codes["values"]))  # an API server refuses another order
        assert codes.get("containerName", pod["containers"][0]["name"]) == pod["containers"][0]["name"]
    for container in containers:
        variables = {variable["name"]: variable for variable in container["env"]}
        assert {mount["name"] for mount in container["volumeMounts"]} <= {volume["name"] for volume in pod["volumes"]}
        assert len(variables) == len(container["env"])
        for argument in (*container["command"], *container["args"]):
            assert set(re.findall(r"(?<!\$)\$\((\w+)\)", argument)) <= variables.keys()
        stop = int(variables.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", {"value": "0"})["value"])
        assert stop < pod["terminationGracePeriodSeconds"]  # the launcher does not wait longer than the kubelet
    policy = kinds["NetworkPolicy"]["spec"]
    assert policy["ingress"] == [{"from": [{"podSelector": policy["podSelector"]}]}]  # from this run's pods alone
    if "TrainJob" in kinds:
        assert kinds["TrainJob"]["spec"]["runtimeRef"]["name"] == kinds["TrainingRuntime"]["metadata"]["name"]
        return
    service, name = kinds["Service"], job["metadata"]["name"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    values = {variable["name"]: variable.get("value") for variable in pod["containers"][0]["env"]}
    assert values["MASTER_ADDR"] == f"{name}-0.{service['metadata']['name']}"
    assert values["NNODES"].partition(":")[2] == str(spec["completions"])


@pytest.mark.parametrize("file", FILES)
def test_what_lies_in_scripts_is_what_kubernetes_takes(file):
    manifest = (ROOT / "scripts/k8s" / file).read_text()
    assert schema_errors(manifest) == []
    check_job(documents(manifest))
    assert schema_errors(manifest.replace("restartPolicy", "restartsPolicy"))


def write_anew() -> None:
    """The manifests in scripts/k8s, after a change of the texts."""
    for file, words in FILES.items():
        run = forked(ROOT / "scripts/k8s", "manifest", *words, f"--image={IMAGE}", f"--out={file}")
        (ROOT / "scripts/k8s/output.txt").unlink()
        assert run.code == 0, run.output


if __name__ == "__main__":
    write_anew()
