"""docs/dev/architecture.md is what the code is: its rooms and pictures are, and a step goes as the table says."""

import re
import runpy
import sys
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch.utils.data import DataLoader, TensorDataset

import project.trainer
from tests.conftest import ROOT

PAGE = (ROOT / "docs/dev/architecture.md").read_text()
HOOKS = [name for name in vars(Callback) if name.startswith("on_") and name not in ("on_load_checkpoint", "on_save_checkpoint")]
HOOKS += ["on_step_begins", "on_step_taken"]  # this project's own


# Of what stands in the table without its class.
OWNERS = {"transfer_batch_to_device": "Small", "training_step": "SingleDeviceStrategy", "step": "SGD"}


class Small(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.network(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        schedule = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.randn(16, 3)), batch_size=4)


class Yours(Callback):
    """Has every hook."""

    def __init__(self, heard: list[str]) -> None:
        for hook in HOOKS:
            setattr(self, hook, lambda *_, hook=hook: heard.append(f"{hook}: yours"))


def wanted(when: str) -> list[str]:
    """What the table says of the first or last micro-batch of a step."""
    (table,) = re.findall(r"\| what is called \|.*?\n\n", PAGE, re.DOTALL)
    calls: list[str] = []
    for cell, which, _ in re.findall(r"^\| (`.*?) \| (each|first|last) \|(.*)\|$", table, re.MULTILINE):
        if which in ("each", when):
            name, *who = re.findall(r"`([\w.]+)`", cell)
            calls += [f"{name}: {callback}" for callback in who] or [name]
    return calls


def test_a_step_goes_as_the_table_says(tmp_path):
    heard: list[str] = []
    functions = {name for name in wanted("first") + wanted("last") if ":" not in name}

    def listen(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        owner = type(frame.f_locals.get("self")).__name__
        if event != "call":
            return
        if code.co_name in HOOKS and "/project/" in code.co_filename:
            heard.append(f"{code.co_name}: {owner}")
        else:
            name = code.co_name if OWNERS.get(code.co_name) == owner else f"{owner}.{code.co_name}"
            if name in functions and heard[-1:] != [name]:
                heard.append(name)

    trainer = project.trainer.Trainer(
        max_steps=2, accelerator="cpu", devices=1, accumulate_grad_batches=2, gradient_clip_val=1.0, callbacks=Yours(heard),
        default_root_dir=tmp_path, log_every_n_steps=1,
    )  # fmt: skip
    before = sys.getprofile()
    sys.setprofile(listen)
    try:
        trainer.fit(Small())
    finally:
        sys.setprofile(before)
    micro_batches = [at for at, name in enumerate(heard) if name == "Steps._note"]
    begins = [at - 1 for at in micro_batches]  # the loader's
    begins[2] -= sum(name.startswith("on_step_begins") for name in heard[begins[1] : begins[2]])
    assert len(begins) == 4
    assert heard[begins[2] : begins[3]] == wanted("first")
    last = heard[begins[3] :]
    assert last[: len(wanted("last"))] == wanted("last")


def test_the_rooms_and_pictures_are_what_the_code_is():
    files = runpy.run_path(str(ROOT / "scripts/architecture"))["written"]()
    outdated = [path.name for path, content in files.items() if not path.exists() or path.read_text() != content]
    assert outdated == [], "run scripts/architecture"
