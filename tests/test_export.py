"""What goes out: each format is loaded in a process without this package, and gives what the checkpoint gives."""

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from PIL import Image
from torch import Tensor
from torchvision.models import squeezenet1_1

from project.errors import UserError
from project.export.capture import HOW, pieces, samples
from project.export.check import compare
from project.export.folder import refuse_strangers, staging
from project.export.formats import trace
from project.model import ImageClassifier, MiniResNet
from project.model.gpt import GPT
from tests.conftest import ROOT, TINY, Run, environment, forked
from tests.own import write_texts

FORMATS = ("safetensors", "torch-export", "onnx")
DDP = "--config=configs/ddp.yaml"
SHORT = ("--trainer.max_steps=2", "--trainer.limit_val_batches=2")


class Undecided(MiniResNet):
    """What it does depends on the values in a tensor."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images if images.mean() > 0 else -images)


class Counting(MiniResNet):
    """What it does depends on the number of samples, as a number."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.reshape(int(images.shape[0]), *images.shape[1:]))


class Moved(Callback):
    """Evaluates other weights than those that are trained, as averages are."""

    def on_validation_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self.kept = {name: value.clone() for name, value in pl_module.state_dict().items()}
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter.add_(1)

    def on_validation_end(self, trainer: Any, pl_module: LightningModule) -> None:
        pl_module.load_state_dict(self.kept)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of torchvision's SqueezeNet on images in folders, on two ranks, and in bf16."""
    folder = tmp_path_factory.mktemp("folders")
    random = np.random.default_rng(0)
    for split, count in (("train", 16), ("val", 11)):
        for name in ("cat", "dog"):
            (folder / "images" / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 256, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / "images" / split / name / f"{number}.png")
    words = (
        *("--trainer.max_steps=2", "--trainer.precision=bf16-mixed", "--data.batch_size=8", "--data.global_batch_size=16"),
        *(
            "--model.network=torchvision.models.squeezenet1_1",
            "--model.network.init_args.num_classes=2",
            "--data.num_workers=0",
        ),
        *("--data.source=project.data.ImageFolders", "--data.source.root=images", "--data.source.image_size=32"),
    )
    run = forked(folder, "fit", DDP, *words, "--run=it", ranks=2)
    assert run.code == 0, run.output
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of MiniResNet on synthetic images."""
    folder = tmp_path_factory.mktemp("tiny")
    run = forked(folder, "fit", DDP, *TINY, *SHORT, "--run=it")
    assert run.code == 0, run.output
    return folder


def fresh(folder: Path, program: str) -> Any:
    """What a program prints as JSON, in a folder and a process that know nothing of this project."""
    words = [sys.executable, "-I", "-c", f"import json, sys\n{program}\nassert 'project' not in sys.modules"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def left(folder: Path) -> set[str]:
    """What an export has left in a run's folder."""
    return {path.name for path in (folder / "lightning_logs/it").iterdir() if "export" in path.name}


_PREPARE = """
import numpy as np
from PIL import Image
about = json.load(open("export.json"))
pixels = np.stack([np.asarray(Image.open(path)) for path in PATHS]).transpose(0, 3, 1, 2)
mean, std = (np.array(about["images"][name], dtype=np.float32)[:, None, None] for name in ("mean", "std"))
images = (pixels / np.float32(255) - mean) / std
"""
_BEFORE = {
    "safetensors": "import torch, torchvision; images = torch.from_numpy(images)\n"
    "network = torchvision.models.squeezenet1_1(num_classes=2)\n",
    "torch-export": "import torch; images = torch.from_numpy(images)\n",
    "onnx": "",
}


@pytest.mark.parametrize("form", ["safetensors", *(pytest.param(form, marks=pytest.mark.slow) for form in FORMATS[1:])])
def test_an_export_is_loaded_by_its_three_lines_without_this_package(folders, form):
    exported = forked(folders, "export", "--run=it", f"--to={form}")
    assert exported.code == 0, exported.output
    place = folders / f"lightning_logs/it/export-{form}"
    about = json.loads((place / "export.json").read_text())
    assert "22 samples of the validation set" in exported.output
    for unwanted in ("Warning", "WARNING", "deprecat", "[torch.onnx]", "Traceback"):
        assert unwanted not in exported.output
    assert about["classes"] == ["cat", "dog"]
    assert (about["run"], about["step"], about["inputs"][0]["shape"]) == ("it", 2, ["batch", 3, 32, 32])
    assert about["check"]["batch_sizes"] == [8, 6, 1]
    assert (about["check"]["largest_difference"] == 0) == (form != "onnx")
    assert (place / "config.yaml").read_bytes() == (place.parent / "config.yaml").read_bytes()
    assert {path.name for path in place.iterdir()} == {"export.json", "config.yaml", about["file"]}

    paths = [str(path) for path in sorted((folders / "images/val").rglob("*.png"))[9:13]]
    lines = _PREPARE.replace("PATHS", repr(paths)) + _BEFORE[form] + "\n".join(about["load"])
    got = fresh(place, lines + "\nprint(json.dumps(np.asarray(output[0] if len(output) == 1 else output.detach()).tolist()))")
    assert all(line in exported.output for line in about["load"])

    (checkpoint,) = (place.parent / "checkpoints").glob("*.ckpt")
    module = ImageClassifier(squeezenet1_1(num_classes=2), channels_last=False)
    module.load_state_dict(torch.load(checkpoint, weights_only=True)["state_dict"])
    pixels = np.stack([np.asarray(Image.open(path)) for path in paths]).transpose(0, 3, 1, 2)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    with torch.no_grad():
        wanted = module.eval()((torch.from_numpy(pixels) / 255 - mean) / std)
    torch.testing.assert_close(torch.tensor(got), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["safetensors", "onnx"])
def test_a_module_of_ones_own_goes_out_with_its_forward_and_tied_weights(quick, tmp_path, form):
    write_texts(tmp_path / "texts")
    words = (
        *("--data.init_args.context=16", "--model.init_args.context=16", "--model.init_args.width=32"),
        *("--trainer.max_steps=2", "--trainer.val_check_interval=1", "--data.init_args.text=texts"),
        *("--model.init_args.layers=1", "--trainer.strategy=sharded"),  # which an export is not
    )
    fitted = quick("fit", "--config=configs/gpt.yaml", *words, "--run=it")
    assert fitted.code == 0, fitted.output
    exported = quick("export", "--run=it", f"--to={form}", "--ckpt_path=last", "--out=over there")
    assert exported.code == 0, exported.output
    about = json.loads((tmp_path / "over there/export.json").read_text())
    assert about["inputs"] == [{"name": "tokens", "shape": ["batch", 16], "dtype": "int64"}]
    assert about["classes"] is None
    if form == "safetensors":
        from safetensors.torch import load_file

        assert about["tied"] == [["tokens.weight", "head.weight"]]
        network = GPT(context=16, layers=1, width=32)
        network.load_state_dict(load_file(tmp_path / "over there/model.safetensors"))


def test_the_weights_are_those_that_an_evaluation_uses(tiny):
    from safetensors.torch import load_file

    moved = "--trainer.callbacks=tests.test_export.Moved"
    states = []
    for words in ((), (moved,)):
        exported = forked(tiny, "export", "--run=it", "--to=safetensors", *words)
        assert exported.code == 0, exported.output
        states.append(load_file(tiny / "lightning_logs/it/export-safetensors/model.safetensors"))
    before, after = states
    names = [name for name, _ in MiniResNet(widths=(8, 16), blocks=1).named_parameters()]
    assert names
    assert all(torch.equal(after[name], before[name] + 1) for name in names)


def test_a_run_begins_with_the_weights_of_an_export(tiny):
    exported = forked(tiny, "export", "--run=it", "--to=safetensors", "--out=weights")
    assert exported.code == 0, exported.output
    tensors = len(MiniResNet(widths=(8, 16), blocks=1).state_dict())
    begun = forked(tiny, "fit", DDP, *TINY, *SHORT, "--model.init_from=weights/model.safetensors")
    assert begun.code == 0, begun.output
    assert f"{tensors} of the network's {tensors} tensors begin as in weights/model.safetensors" in begun.output
    (tiny / "weights/model.safetensors").write_bytes(b"no weights")
    refused = forked(tiny, "fit", DDP, *TINY, *SHORT, "--model.init_from=weights/model.safetensors")
    assert refused.code == 2
    assert "weights/model.safetensors can't be read as safetensors" in refused.output
    assert "Traceback" not in refused.output


@pytest.mark.slow
def test_a_network_that_cannot_be_traced_is_one_line(quick, tmp_path):
    def export(name: str, *words: str) -> Run:
        return quick("export", f"--run={name}", *words)

    for name in ("Undecided", "Counting"):
        network = ("--model.network=tests.test_export." + name, "--model.network.widths=[8]", "--model.network.blocks=1")
        fitted = quick(
            "fit", DDP, *(argument for argument in TINY if "network" not in argument), *SHORT, *network, f"--run={name}"
        )
        assert fitted.code == 0, fitted.output
    for name, to, cause in (
        ("Undecided", "onnx", "ImageClassifier.forward can't be traced: "),
        ("Counting", "torch-export", "does not take any number of samples: "),
    ):
        refused = export(name, f"--to={to}")
        assert refused.code == 2
        assert cause in refused.output
        assert "HINT: " in refused.output
        assert len(refused.output.splitlines()) == 2, refused.output  # of which weights, and why not
        assert not [path for path in (tmp_path / "lightning_logs" / name).iterdir() if "export" in path.name]
    assert "--batch_size N" in refused.output
    fixed = export("Counting", "--to=torch-export", "--batch_size=3")
    assert fixed.code == 0, fixed.output
    about = json.loads((tmp_path / "lightning_logs/Counting/export-torch-export/export.json").read_text())
    assert about["inputs"][0]["shape"] == [3, 3, 8, 8]
    assert export("Undecided", "--to=safetensors").code == 0


MISTAKES = {
    "no format": (["--run=it"], "export needs a format. HINT: --to safetensors, "),
    "a typo in a format": (["--run=it", "--to=onx"], "to: Expected one of 'safetensors', 'onnx',"),
    "no run": (["--to=onnx"], "export needs weights. HINT: --run NAME"),
    "a run that is not there": (["--run=nope", "--to=onnx"], "The run nope has no good checkpoint"),
    "a damaged checkpoint": (["--run=it", "--to=onnx", "--ckpt_path=short.ckpt"], "can't be read as a checkpoint"),
    "no samples": (["--run=it", "--to=onnx", "--batch_size=0"], "batch_size is a number of samples"),
    "a folder of others": (["--run=it", "--to=onnx", "--out=others"], "holds something else than an export"),
    "a file": (["--run=it", "--to=onnx", "--out=short.ckpt"], "is a file. HINT: --out takes a folder."),
    "no place": (["--run=it", "--to=torch-export", "--out=short.ckpt/x"], "can't be written: "),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing(tiny, mistake):
    words, cause = MISTAKES[mistake]
    (tiny / "short.ckpt").write_bytes(b"PK\x03\x04 and no more")
    (tiny / "others").mkdir(exist_ok=True)
    (tiny / "others/thesis.txt").write_text("the only copy")
    before = left(tiny)
    run = forked(tiny, "export", *words)
    assert run.code in (1, 2), run.output
    assert cause in run.output
    assert "Traceback" not in run.output
    assert run.output.count("ERROR") == 1
    assert left(tiny) == before
    assert [path.name for path in (tiny / "others").iterdir()] == ["thesis.txt"]
    assert not (tiny / "lightning_logs/nope").exists()


@pytest.mark.parametrize(("form", "library"), [("onnx", "onnxruntime"), ("safetensors", "safetensors")])
def test_a_library_that_is_missing_is_named_at_once(cli, tmp_path, form, library):
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked/sitecustomize.py").write_text(f"import sys\nsys.modules['{library}'] = None\n")
    path = f"{tmp_path}/blocked:{ROOT}"
    words = (DDP, f"--to={form}", "--ckpt_path=it.ckpt")
    run = cli("export", *words, PYTHONPATH=path)
    assert run.code == 2
    assert f"--to {form} needs {library}. HINT: pip install 'samerun[export]'" in run.output
    assert len(run.output.splitlines()) == 1


def test_outputs_are_compared_by_the_size_of_the_largest():
    def made(first: float, **settings: Any) -> list[list[Tensor]]:
        return [[torch.tensor([[first, -100.0]], **settings)]]

    assert compare(made(1.0), made(1.0), 0.0).largest == 0
    assert compare(made(1.0), made(1.005), 1e-4) == pytest.approx((0.005, 0.00005), rel=1e-3)
    assert compare(made(np.nan), made(np.nan), 0.0).largest == 0
    for outputs in (made(1.1), made(np.nan), made(np.inf), made(1.0, dtype=torch.float64), [made(1.0)[0][:0]]):
        with pytest.raises(UserError, match="The exported network"):
            compare(made(1.0), outputs, 1e-4)
    with pytest.raises(UserError):
        compare([[torch.zeros(2)]], [[torch.ones(2)]], 1e-4)


class OneLess(Callback):
    """Damages what is exported: the files that go out are not of the network that the check is made with."""

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        from project.export import formats

        def write(module: LightningModule, path: Path, about: Any, real: Any = formats.write_weights) -> None:
            network = MiniResNet(widths=(8, 16), blocks=1)
            with torch.no_grad():
                for target, source in zip(network.state_dict().values(), module.state_dict().values(), strict=True):
                    target.copy_(source)
                network.head.bias.sub_(1)
            real(network, path, about)

        def trace(module: LightningModule, *args: Any, real: Any = formats.trace) -> Any:
            bias = module.network.head.bias
            with torch.no_grad():
                bias.sub_(1)
                return real(module, *args)

        formats.write_weights, formats.trace = write, trace


@pytest.mark.parametrize("form", ["safetensors", "onnx"])
@pytest.mark.slow
def test_a_file_with_other_weights_is_left_out_and_the_one_before_stays(tiny, form):
    place = tiny / f"before-{form}"
    place.mkdir()
    before = {"export.json": b"{}", "model": b"of an export before"}
    for name, content in before.items():
        (place / name).write_bytes(content)
    damaged = "--trainer.callbacks=tests.test_export.OneLess"
    refused = forked(tiny, "export", "--run=it", f"--to={form}", f"--out={place.name}", damaged)
    assert refused.code == 1, refused.output
    assert "The exported network is another one: its outputs differ by up to" in refused.output
    assert {path.name: path.read_bytes() for path in place.iterdir()} == before
    assert not [path for path in tiny.iterdir() if path.name.startswith(".")]


def test_a_folder_takes_its_place_whole_or_not_at_all(tmp_path):
    target = tmp_path / "new" / "export"
    with suppress(KeyboardInterrupt), staging(target) as folder:
        (folder / "export.json").write_text("{}")
        raise KeyboardInterrupt
    assert not list((tmp_path / "new").iterdir())
    for text in ("1", "2"):
        refuse_strangers(target)
        with staging(target) as folder:
            (folder / "export.json").write_text(text)
            (folder / text).touch()
    assert [path.name for path in target.parent.iterdir()] == ["export"]
    assert {path.name for path in target.iterdir()} == {"export.json", "2"}
    with pytest.raises(UserError, match=r"can't be written: .*No space left"), staging(target):
        raise OSError(28, "No space left on device")
    assert (target / "2").exists()


class Two(LightningModule):
    def forward(self, ids: Tensor, mask: Tensor, scale: Tensor | None = None) -> Tensor:
        return ids * mask


class One(LightningModule):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def test_the_inputs_of_forward_are_found_in_a_batch():
    x = torch.zeros(3, 2, dtype=torch.float64)
    for batch in (x, (x, 1), [x, x], {"x": x}, {"image": x, "label": 1}, ({"x": x}, 1)):
        inputs = samples(One(), [batch], "a set")
        assert (inputs.names, len(inputs.batches[0][0]), inputs.batches[0][0].dtype) == (["x"], 3, torch.float32)
    pair = samples(Two(), [{"mask": x, "ids": x + 1, "other": x}], "a set")
    assert pair.names == ["ids", "mask"]
    assert pair.batches[0][0].sum() == 6
    with pytest.raises(UserError, match="can't be told"):
        samples(Two(), [x], "a set")
    module = Two()
    module.example_input_array = (x, x)
    assert samples(module, [x], "a set").origin == "the module's example_input_array"
    module.example_input_array = (x, x[:1])
    with pytest.raises(UserError, match="no first dimension"):
        samples(module, [x], "a set")
    assert "example_input_array" in HOW


def test_any_number_of_samples_is_checked_with_one_and_with_more():
    for sizes, wanted in (((4, 3), [4, 3, 1]), ((1, 1), [2, 1, 1, 1])):
        inputs = samples(One(), [torch.rand(size, 2) for size in sizes], "a set")
        assert [len(piece[0]) for piece in pieces(inputs.batches, None)] == wanted
    inputs = samples(One(), [torch.rand(size, 2) for size in (7, 2)], "a set")
    assert [len(piece[0]) for piece in pieces(inputs.batches, 3)] == [3, 3, 3]


def test_nothing_of_the_formats_is_imported_by_a_fit():
    program = "import sys, project.cli.main; print({'onnx', 'onnxruntime', 'onnxscript', 'safetensors'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", program], env=environment(), cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


class AnyName(LightningModule):
    def forward(self, **batch):
        return batch["x"] + batch["y"]


def test_a_forward_that_takes_a_whole_batch_by_its_names():
    x, module = torch.ones(3, 2), AnyName()
    inputs = samples(module, [{"x": x, "y": x, "name": ["a", "b", "c"]}], "a set")
    assert inputs.names == ["x", "y"]
    program = trace(module, inputs, None)
    assert torch.equal(program.module()(x[:1], x[:1]), 2 * x[:1])
