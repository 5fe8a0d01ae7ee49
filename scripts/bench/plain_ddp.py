"""The plain loop: MiniResNet under DistributedDataParallel as a good PyTorch tutorial ends with it. `project bench` runs it.

    python scripts/bench/plain_ddp.py
    torchrun --nproc-per-node=2 scripts/bench/plain_ddp.py --batch-size 64

It is complete and correct, and made of nothing but PyTorch. What it leaves on the table is what the benchmark measures.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class MiniResNet(nn.Module):
    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
        stages = [(64, 64, 1), (64, 128, 2), (128, 256, 2)]
        blocks = [[Block(inputs, outputs, stride), Block(outputs, outputs, 1)] for inputs, outputs, stride in stages]
        self.stages = nn.Sequential(*[block for stage in blocks for block in stage])
        self.head = nn.Linear(256, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages(self.stem(x))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class SyntheticDataset(Dataset):
    """Noise around a pattern for each class; a sample is made from a generator of its own, when it is asked for."""

    def __init__(self, size: int, num_classes: int = 10) -> None:
        self.size, self.num_classes = size, num_classes
        self.patterns = torch.randn(num_classes, 3, 32, 32, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        label = int(torch.randint(self.num_classes, (1,), generator=generator))
        return self.patterns[label] + torch.randn(3, 32, 32, generator=generator), label


def loader_of(args: argparse.Namespace) -> DataLoader:
    dataset = SyntheticDataset(args.size)
    sampler = DistributedSampler(dataset, shuffle=True) if dist.is_initialized() else None
    return DataLoader(
        dataset,
        batch_size=args.batch_size,
        sampler=sampler,
        shuffle=sampler is None,
        num_workers=args.workers,
        pin_memory=torch.cuda.is_available(),
        drop_last=True,
        persistent_workers=args.workers > 0,
    )


def train(args: argparse.Namespace, network: nn.Module, after_step=lambda: None) -> None:
    """`after_step`: what the benchmark does between two steps."""
    rank, local_rank = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("nccl" if cuda else "gloo")

    loader = loader_of(args)
    model: nn.Module = network.to(device)
    if dist.is_initialized():
        model = DistributedDataParallel(model, device_ids=[local_rank] if cuda else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    lower = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(args.precision)
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")

    for epoch in range(args.epochs):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        model.train()
        loss_sum, correct, seen = 0.0, 0, 0
        for images, labels in loader:
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device.type, dtype=lower, enabled=lower is not None):
                logits = model(images)
                loss = F.cross_entropy(logits, labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

            loss_sum += loss.item() * len(labels)
            correct += (logits.argmax(1) == labels).sum().item()
            seen += len(labels)
            after_step()
        scheduler.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss_sum / seen:.4f}, accuracy {correct / seen:.4f}")

    if dist.is_initialized():
        dist.destroy_process_group()


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--batch-size", type=int, default=64, help="of each process")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--lr", type=float, default=0.01)
    default_precision = "fp16" if torch.cuda.is_available() else "fp32"
    parser.add_argument(
        "--precision", choices=["fp32", "fp16", "bf16"], default=default_precision, help="of the network; here: %(default)s"
    )
    return parser


if __name__ == "__main__":
    torch.manual_seed(0)
    train(arguments().parse_args(), MiniResNet())
