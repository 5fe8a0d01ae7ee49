"""Lightning's own examples, unchanged: on one rank and on two, from the command line, to the same weights."""

import json

import pytest
import torch

from tests.conftest import forked
from tests.train.test_own import newest

# The module brings its loader, with micro-batches of one sample. In fp32 its first steps make much of the order of additions.
TRANSFORMER = (
    *("fit", "--model=lightning.pytorch.demos.transformer.LightningTransformer", "--model.init_args.vocab_size=300"),
    *(
        "--trainer.global_batch_size=4",
        "--trainer.max_steps=6",
        "--trainer.accelerator=cpu",
        "--trainer.precision=64-true",
        "--run=it",
    ),
)
BORING = (
    *("fit", "--model=lightning.pytorch.demos.boring_classes.BoringModel"),
    *("--data=lightning.pytorch.demos.boring_classes.BoringDataModule", "--trainer.global_batch_size=4"),
    *("--trainer.max_epochs=2", "--trainer.accelerator=cpu", "--run=it"),
)


def trained(folder, *words, ranks):
    folder.mkdir()
    (folder / "data").mkdir()  # where the example looks before it would download its text
    lines = (f"the {number} th line of this text says {number * number % 97} words of {number % 7}\n" for number in range(90))
    (folder / "data/wikitext-2.txt").write_text("".join(lines))
    run = forked(folder, *words, ranks=ranks)
    assert run.code == 0, run.output
    return newest(folder)["state_dict"]


@pytest.mark.parametrize("words", [TRANSFORMER, BORING], ids=["transformer", "boring"])
def test_an_example_ends_the_same_on_two_ranks(tmp_path, words):
    alone, together = (trained(tmp_path / f"{ranks}", *words, ranks=ranks) for ranks in (1, 2))
    assert alone.keys() == together.keys()
    for name, value in alone.items():
        torch.testing.assert_close(together[name], value, msg=lambda text, name=name: f"{name}: {text}")
    manifests = [max((tmp_path / f"{ranks}/lightning_logs/it/checkpoints").glob("*.json")) for ranks in (1, 2)]
    positions = [json.loads(file.read_text())["position"] for file in manifests]
    assert positions[0] == positions[1]
