"""Lost ranks on GPUs are replaced by forks of a process that has not used CUDA: `recover.restarts`."""

import pytest

from tests.conftest import Cli
from tests.standin.test_runs import DDP, fault, final, plugged
from tests.survive.test_resume import curves, same

pytestmark = pytest.mark.slow

RECOVER = ("--recover.restarts=9", "--recover.every_n_steps=2")


@pytest.mark.parametrize(("launcher", "ranks"), [("python", 2), pytest.param("torchrun", 3, marks=pytest.mark.faults)])
def test_killed_ranks_on_gpus_are_replaced(gpu: Cli, gpu_program: Cli, launcher: str, ranks: int) -> None:
    kill = plugged(fault(rank=1, step=3, how="kill"))
    started = {"torchrun": ranks} if launcher == "torchrun" else {}
    words = () if started else (f"--trainer.devices={ranks}",)
    recovered = gpu_program(*DDP, *RECOVER, *words, kill, gpus=ranks, **started)
    assert recovered.code == 0, recovered.output
    assert recovered.output.count("All ranks resume") == 1
    assert " on cuda" in recovered.output
    checkpoint, logged = final(recovered.folder), curves(recovered.folder)
    whole = gpu(*DDP, "--run=whole", plugged(), ranks=ranks)
    assert whole.code == 0, whole.output
    (recovered.folder / "lightning_logs/it").rename(recovered.folder / "recovered")
    (recovered.folder / "lightning_logs/whole").rename(recovered.folder / "lightning_logs/it")
    assert same(checkpoint, final(whole.folder))
    assert logged == curves(whole.folder)


def test_a_module_may_use_cuda_when_it_is_imported(gpu_program: Cli, tmp_path) -> None:
    """Spare ranks, which would hold memory of the GPU beside the ranks that train, then end by themselves."""
    (tmp_path / "touching.py").write_text(
        "import torch\nfrom lightning.pytorch import Callback as Own\nNAME = torch.cuda.get_device_name(0)\n"
    )
    own = '--trainer.callbacks+={"class_path": "touching.Own"}'
    done = gpu_program(*DDP, *RECOVER, "--trainer.devices=2", plugged(fault(rank=1, step=3, how="kill")), own, gpus=2)
    assert done.code == 0, done.output
    assert done.output.count("All ranks resume") == 1
