"""MiniResNet is a small residual network for small images, in plain PyTorch. The reference size has 2,777,674 parameters."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from project.errors import UserError


class BasicBlock(nn.Module):
    """A block of two 3x3 convolutions and a shortcut, a 1x1 projection where the shape changes (He et al., 2015)."""

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Sequential()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out = self.relu(out + self.shortcut(x))
        return out


class MiniResNet(nn.Module):
    """A residual network for images of any size from 4x4 upwards.

    Args:
        num_classes: outputs of the linear head.
        in_channels: channels of the images, 3 for colour.
        widths: channels of the stages; every stage but the first halves the image.
        blocks: basic blocks in each stage.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_channels: int = 3,
        widths: Sequence[int] = (64, 128, 256),
        blocks: int = 2,
    ) -> None:
        super().__init__()
        if blocks < 1:
            raise UserError(f"blocks is 1 at least, and not {blocks}")
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, widths[0], 3, padding=1, bias=False),
            nn.BatchNorm2d(widths[0]),
            nn.ReLU(inplace=True),
        )
        stages, channels = [], widths[0]
        for number, width in enumerate(widths):
            first = BasicBlock(channels, width, stride=1 if number == 0 else 2)
            stages.append(nn.Sequential(first, *(BasicBlock(width, width) for _ in range(blocks - 1))))
            channels = width
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels, num_classes)

        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        features = self.stages(self.stem(images))
        logits: Tensor = self.head(torch.flatten(nn.functional.adaptive_avg_pool2d(features, 1), 1))
        return logits
