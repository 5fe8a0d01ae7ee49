"""A convolution that torch gets wrong in channels_last on some CPUs is computed in the usual order there."""

import torch
from torch import nn

from project.model import MiniResNet
from project.model.channels_last import corrupted
from tests.conftest import TINY

NARROW = ("--model.network.init_args.widths=[4,8]", "--trainer.max_steps=3", "--trainer.limit_val_batches=1")


def test_only_the_layers_that_torch_gets_wrong_are_named():
    good = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 1, 2), nn.Conv2d(4, 8, 1), nn.Conv2d(4, 8, 2, 2))
    assert corrupted(good, "AVX2") is None
    for bad in (nn.Conv2d(4, 8, 1, 2), nn.Conv2d(16, 16, 1, (1, 2), groups=4)):
        assert corrupted(nn.Sequential(good, bad), "AVX2") == "1"
        assert corrupted(nn.Sequential(good, bad), "AVX512") is None
    assert corrupted(MiniResNet(), "AVX2") is None


def test_a_narrow_network_trains(quick):
    run = quick("fit", "--config=configs/ddp.yaml", *(argument for argument in TINY if "widths" not in argument), *NARROW)
    assert run.code == 0, run.output
    count = run.output.count("model.channels_last is off: this CPU has no AVX-512")
    assert count == ("AVX512" not in torch.backends.cpu.get_cpu_capability())
