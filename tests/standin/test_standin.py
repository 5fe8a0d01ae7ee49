"""What the stand-in for a GPU promises. Each test runs on its GPUs, in processes that the pool forks."""

import ctypes
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from project.step.ddp import broadcast_from_rank_0
from tests.standin import build, pool

pytestmark = pytest.mark.skipif(pool.REAL, reason="says what the stand-in promises")
GPU = "cuda"


def on_gpus(ranks: int = 1, **variables: str) -> Callable[[Callable[[], None]], Any]:
    """Has the pool run a test's body on each rank."""

    def decorate(body: Callable[[], None]) -> Any:
        def test(gpu_pool: pool.Pool, tmp_path: Path) -> None:
            code, output = gpu_pool.run(tmp_path, ranks=ranks, program=f"{__name__}:{body.__name__}.body", **variables)
            assert code == 0, output

        test.body = body  # type: ignore[attr-defined]
        test.__doc__ = body.__doc__
        return test

    return decorate


def raw_stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def equal(result: torch.Tensor, cpus: torch.Tensor) -> None:
    assert result.device.type == GPU
    torch.testing.assert_close(result.cpu(), cpus, rtol=1e-5, atol=1e-6, equal_nan=True)


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10)
    )


def losses(net: nn.Module, device: str, kind: torch.dtype | None = None, steps: int = 3) -> list[float]:
    images, labels = torch.randn(8, 3, 8, 8, generator=torch.manual_seed(2)).to(device), torch.arange(8).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, fused=True)
    seen = []
    for _ in range(steps):
        with torch.autocast(device, kind, enabled=kind is not None):
            loss = F.cross_entropy(net(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen


@on_gpus()
def test_what_was_first_seen_in_inference_mode_is_written_after_it() -> None:
    values = torch.ones(4, device=GPU)
    with torch.inference_mode():
        assert values.sum() == 4
    equal(torch.maximum(values, 2 * values, out=values), torch.full((4,), 2.0))


@on_gpus()
def test_a_network_trains_as_on_the_cpu() -> None:
    cpu, gpu = network(), network().to(GPU)
    assert losses(gpu, GPU) == pytest.approx(losses(cpu, "cpu"), rel=1e-5)
    for value, cpus in zip(gpu.state_dict().values(), cpu.state_dict().values(), strict=True):
        equal(value, cpus)
    last = network().to(GPU, memory_format=torch.channels_last)
    assert losses(last, GPU) == pytest.approx(losses(network(), "cpu"), rel=1e-4)
    for kind in (torch.float16, torch.bfloat16):
        assert losses(network().to(GPU), GPU, kind) == pytest.approx(losses(network(), "cpu", kind), rel=0.02)


@on_gpus()
def test_views_writes_and_masks() -> None:
    results = []
    for device in ("cpu", GPU):
        x = torch.arange(24.0, device=device).view(4, 6)
        x[1:3, ::2] += 100
        x.t()[0].mul_(2)
        x.transpose(0, 1).reshape(-1)[:3] = 7  # a copy, and thus no write
        x[x > 100] = -1
        x[torch.tensor([0, 3], device=device), 1] = 5
        torch._foreach_add_([x[0], x[1]], 0.5)
        out = torch.empty(0, device=device)
        torch.cat([x, x.flip(1)], out=out)
        chosen = x[x > 0], x.nonzero(), torch.unique(x.int()), x.masked_select(x < 0)
        square = x[:, :4]
        complex_ = torch.view_as_complex(x.view(4, 3, 2)).conj() * 2j
        results.append(
            [x, out, *chosen, x.softmax(1), x.double().sort(0, descending=True)[1], complex_.imag, square @ square.t()]
        )
    for cpus, value in zip(*results, strict=True):
        equal(value, cpus)
    assert "[ 0.5000" in str(results[1][0])
    assert torch.equal(results[1][0], results[0][0].to(GPU))


@on_gpus()
def test_random_numbers_follow_from_the_generator_of_the_gpu() -> None:
    def draw() -> torch.Tensor:
        return torch.cat([torch.rand(4, device=GPU), F.dropout(torch.ones(64, device=GPU))])

    before = torch.get_rng_state()
    torch.cuda.manual_seed(3)
    first, state, second = draw(), torch.cuda.get_rng_state(), draw()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.manual_seed(3)
    with torch.cuda.graph(graph):
        replayed = draw()
    graph.replay()
    assert torch.equal(replayed, first)
    graph.replay()
    assert torch.equal(replayed, second)
    assert not torch.equal(first, second)
    torch.cuda.set_rng_state(state)
    assert torch.equal(draw(), second)
    assert torch.equal(torch.get_rng_state(), before)


@on_gpus()
def test_memory_is_no_zeros_and_ends() -> None:
    assert torch.empty(1 << 20, device=GPU).isnan().all()
    free, total = torch.cuda.mem_get_info()
    assert (free < total, total) == (True, 80 << 30)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        torch.empty(81 << 30, dtype=torch.uint8, device=GPU)
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] > free


@on_gpus(STANDIN_GPUS="3", STANDIN_GIB="0.5", STANDIN_NAME="A small GPU")
def test_devices_are_as_many_as_large_and_as_used_as_asked() -> None:
    from tests.standin.emulate import DRIVER

    assert (torch.cuda.device_count(), torch.cuda.get_device_name()) == (3, "A small GPU")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 30, dtype=torch.uint8, device="cuda:2")
    torch.ones(3, device="cuda:2").sum().item()
    assert DRIVER.standin_contexts() & 0b010 == 0


@on_gpus()
def test_tensors_without_values_stay_so() -> None:
    with FakeTensorMode(), torch.device(GPU):
        net, images = network(), torch.randn(8, 3, 8, 8)
        F.cross_entropy(net(images), torch.zeros(8, dtype=torch.long, device=GPU)).backward()
    assert isinstance(net[0].weight.grad, FakeTensor)
    assert (net[0].weight.grad + 1).device.type == net(images).device.type == GPU


@on_gpus()
def test_other_threads_compute() -> None:
    seen: list[float] = []
    thread = threading.Thread(target=lambda: seen.append(torch.ones(3, device=GPU).cumsum(0)[2].item()))
    thread.start()
    thread.join()
    assert seen == [3]


@on_gpus()
def test_a_graph_is_replayed_with_new_input() -> None:
    net, eager = network().to(GPU), network().to(GPU)
    images, labels = torch.randn(8, 3, 8, 8, device=GPU), torch.arange(8, device=GPU)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        F.cross_entropy(net(images), labels).backward()
    net.load_state_dict(eager.state_dict())
    net.zero_grad(set_to_none=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        loss = F.cross_entropy(net(images), labels)
        loss.backward()
    assert not net[0].weight.grad.any()  # captured, and not computed
    for _ in range(3):
        images.normal_()
        eager.zero_grad()
        expected = F.cross_entropy(eager(images), labels)
        expected.backward()
        net.zero_grad(set_to_none=False)
        graph.replay()
        equal(loss.detach(), expected.detach().cpu())
        for parameter, plain in zip(net.parameters(), eager.parameters(), strict=True):
            equal(parameter.grad, plain.grad.cpu())
    equal(net[1].running_mean, eager[1].running_mean.cpu())


def pageable_copy(x: torch.Tensor) -> None:
    ctypes.CDLL(None).cudaMemcpyAsync(*map(ctypes.c_void_p, (x.data_ptr(), torch.ones(4).data_ptr(), 16, 4, raw_stream())))


def unjoined_stream(x: torch.Tensor) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(1)


def wait_for_the_host(x: torch.Tensor) -> None:
    x.sum().item()


def wait_for_the_device(x: torch.Tensor) -> None:
    torch.cuda.synchronize()


def wait_in_another_thread(x: torch.Tensor) -> None:
    def wait() -> None:
        with pytest.raises(RuntimeError):
            torch.cuda.synchronize()

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()


def number_of_values(x: torch.Tensor) -> None:
    x.nonzero()


def foreign_event(x: torch.Tensor) -> None:
    before = torch.cuda.default_stream().record_event()
    torch.cuda.current_stream().wait_event(before)


REFUSED = {
    pageable_copy: "previous error during capture",
    unjoined_stream: "unjoined work",
    wait_for_the_host: "not permitted when stream is capturing",
    wait_for_the_device: "not permitted when stream is capturing",
    wait_in_another_thread: "previous error during capture",
    number_of_values: "not permitted when stream is capturing",
    foreign_event: "dependency created on uncaptured work",
}


def captured(work: Callable[[torch.Tensor], None], x: torch.Tensor, forbids: str = "global") -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=forbids):
        x.add_(1)
        work(x)
    return graph


@on_gpus()
def test_what_a_driver_refuses_in_a_capture_is_refused() -> None:
    for illegal, reason in REFUSED.items():
        x = torch.zeros(4, device=GPU)
        with pytest.raises(RuntimeError) as refusal:
            captured(illegal, x)
        chain = f"{refusal.value}{refusal.value.__context__}"
        assert reason in chain, (illegal, chain)


@on_gpus()
def test_streams_that_are_joined_and_pinned_memory_are_captured() -> None:
    pinned = torch.ones(4).pin_memory()
    thread = threading.Thread(target=torch.cuda.synchronize)

    def work(x: torch.Tensor) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.add_(pinned.to(GPU, non_blocking=True))
        torch.cuda.current_stream().wait_stream(side)
        thread.start()
        thread.join()

    x = torch.zeros(4, device=GPU)
    graph = captured(work, x, forbids="thread_local")
    assert x.tolist() == [0] * 4
    graph.replay()
    pinned.fill_(5)
    graph.replay()
    assert x.tolist() == [8] * 4


def connect() -> tuple[int, int]:
    rank, size = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.cuda.set_device(rank)
    device = torch.device(GPU, rank)
    store = {} if size > 1 else {"store": dist.HashStore()}
    dist.init_process_group("nccl", rank=rank, world_size=size, device_id=device, timeout=timedelta(seconds=60), **store)
    return rank, size


@on_gpus(ranks=2)
def test_ranks_begin_alike_however_their_tensors_lie() -> None:
    """NCCL sends no gaps, and no int16."""
    rank, _ = connect()
    first = torch.arange(1.0, 25.0, device=GPU).view(2, 3, 2, 2)
    whole = first if rank == 0 else torch.zeros_like(first)

    def kinds(of: torch.Tensor) -> list[torch.Tensor]:
        return [of.flatten(1).t(), of.to(memory_format=torch.channels_last), of.flatten()[::2], of.short(), of.sum()]

    tensors = kinds(whole.clone())
    broadcast_from_rank_0(tensors)
    for tensor, wanted in zip(tensors, kinds(first), strict=True):
        assert tensor.stride() == wanted.stride()
        assert torch.equal(tensor.cpu(), wanted.cpu())


def gradients_in_a_graph(stream_of_ddp: torch.cuda.Stream) -> None:
    stream = torch.cuda.Stream()
    x = torch.randn(8, 3, 8, 8, device=GPU)
    with torch.cuda.stream(stream_of_ddp):
        net = DistributedDataParallel(network().to(GPU), device_ids=[0])
    with torch.cuda.stream(stream):
        for _ in range(11):  # as PyTorch's notes on graphs have it
            net(x).sum().backward()
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
        net(x).sum().backward()


@on_gpus(TORCH_DIST_USE_NCCL2="0", TORCH_NCCL_ASYNC_ERROR_HANDLING="0")
def test_ddp_of_another_stream_is_refused_in_a_capture() -> None:
    connect()
    gradients_in_a_graph(torch.cuda.Stream())
    with pytest.raises(RuntimeError, match="stale reference to the default stream"):
        gradients_in_a_graph(torch.cuda.default_stream())
    os._exit(0)


@on_gpus()
def test_waits_of_the_host_are_errors_if_pytorch_is_told_so() -> None:
    x, pinned = torch.ones(4, device=GPU), torch.empty(4, pin_memory=True)
    torch.cuda.set_sync_debug_mode("error")
    pinned.copy_(x, non_blocking=True)
    y = (x @ x).relu()
    for wait in (y.item, x.nonzero, x.tolist, lambda: x[x > 0], lambda: torch.ones(4).copy_(x)):
        with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
            wait()
    torch.cuda.set_sync_debug_mode("default")
    assert pinned.tolist() == [1] * 4


@on_gpus()
def test_a_grad_scaler_leaves_out_the_step_that_overflows() -> None:
    weight = nn.Parameter(torch.ones(4, device=GPU))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    scaler = torch.amp.GradScaler(GPU, init_scale=2.0**20)
    for factor, scale in ((1.0, 2.0**20), (1e38, 2.0**19), (1.0, 2.0**19)):
        before = weight.clone()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(weight, before) == (factor > 1)
        assert scaler.get_scale() == scale


def check_collectives() -> None:
    rank, size = connect()
    large = (1 << 20) + 3  # more than goes at once
    for kind in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.uint8):
        for length in (1, large if kind is torch.float32 else 1001):
            own = (torch.arange(length, device=GPU) % 7 + rank).to(kind)
            everybody = [(torch.arange(length) % 7 + peer).to(kind) for peer in range(size)]
            summed = own.clone()
            dist.all_reduce(summed)
            equal(summed, sum(everybody[1:], everybody[0]))
            highest = own.clone()
            dist.all_reduce(highest, dist.ReduceOp.MAX)
            equal(highest, everybody[-1])
            gathered = torch.empty(size * length, dtype=kind, device=GPU)
            dist.all_gather_into_tensor(gathered, own)
            equal(gathered, torch.cat(everybody))
            part = torch.empty_like(own)
            dist.reduce_scatter_tensor(part, gathered)
            equal(part, everybody[rank] * size)
            shown = own.clone()
            dist.broadcast(shown, 1)
            equal(shown, everybody[1])
            received = torch.empty_like(own)
            ways = [dist.P2POp(dist.isend, own, (rank + 1) % size), dist.P2POp(dist.irecv, received, (rank - 1) % size)]
            for work in dist.batch_isend_irecv(ways):
                work.wait()
            equal(received, everybody[(rank - 1) % size])
    for kind in (torch.float16, torch.bfloat16):
        rounded = [torch.linspace(0, peer + 1, 101).to(kind) for peer in range(size)]
        summed = rounded[rank].to(GPU)
        dist.all_reduce(summed)
        assert torch.equal(summed.cpu(), sum(values.float() for values in rounded).to(kind))
    mean = torch.tensor([float(rank)], device=GPU)
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    assert mean.item() == 1
    pieces = list(torch.empty(3, 2, device=GPU))
    dist.all_to_all(pieces, list((torch.arange(6.0, device=GPU) + 10 * rank).view(3, 2)))
    assert torch.stack(pieces)[:, 0].tolist() == [2 * rank, 2 * rank + 10, 2 * rank + 20]
    pair = dist.new_group([0, 2])
    if rank != 1:
        summed = torch.ones(1, device=GPU)
        dist.all_reduce(summed, group=pair)
        assert summed.item() == 2
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": peer} for peer in range(size)]
    graph, x = torch.cuda.CUDAGraph(), torch.ones(2, device=GPU)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = x * 2
        dist.all_reduce(y)
        y += 1
    for value in (rank, 10.0):
        x.fill_(value)
        graph.replay()
        assert y.tolist() == [7 if value != 10 else 61] * 2
    assert not list(Path(os.environ["STANDIN_NCCL"]).iterdir())
    dist.destroy_process_group()


@on_gpus(ranks=3, TORCH_DIST_USE_NCCL2="0")
def test_collectives_of_the_old_process_group() -> None:
    check_collectives()


@on_gpus(ranks=3, TORCH_DIST_USE_NCCL2="1")
def test_collectives_of_the_new_process_group() -> None:
    check_collectives()


@on_gpus(ranks=2, STANDIN_NCCL_FAIL="1:3", TORCH_NCCL_ASYNC_ERROR_HANDLING="0")
def test_a_collective_fails_on_the_rank_that_is_asked_for() -> None:
    rank, _ = connect()
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    x = torch.ones(1, device=GPU)
    dist.all_reduce(x)
    dist.all_reduce(x)
    assert x.item() == 4
    if rank == 1:
        with pytest.raises(RuntimeError, match="NCCL"):
            dist.all_reduce(x, group=alone)
    else:
        dist.all_reduce(x, group=alone)
    os._exit(0)


@on_gpus(STANDIN_HANG="0:4")
def test_a_gpu_that_hangs_computes_nothing_more() -> None:
    x = torch.ones(1, device=GPU)
    event = torch.cuda.Event()
    event.record()
    assert event.query()
    while event.query():
        x.add_(1)
        event.record()
    for _ in range(10):
        x.add_(1)  # queued
    assert ctypes.c_float.from_address(x.data_ptr()).value == 3
    ended = threading.Event()
    threading.Thread(target=lambda: (torch.cuda.synchronize(), ended.set()), daemon=True).start()
    assert not ended.wait(0.2)
    os._exit(0)


@on_gpus()
def test_what_is_lacking_says_so() -> None:
    assert "ncclCommRevoke" in build.lacking()
    assert "cudaMalloc" not in build.lacking()
    assert ctypes.CDLL(None).ncclCommRevoke() == 801


def test_without_a_compiler_tests_are_skipped_or_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("STANDIN_TESTS", raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"not found|without CUDA"):
        pool.environment(1, "")
    monkeypatch.setenv("STANDIN_TESTS", "required")
    with pytest.raises(pytest.fail.Exception, match="STANDIN_TESTS=required"):
        pool.environment(1, "")
