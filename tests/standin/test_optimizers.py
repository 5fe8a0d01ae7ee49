"""Each optimiser of torch with each strategy: it trains, or it is refused by name before the first step."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.standin.optimizers import NOT_IN_THIS_TORCH

pytestmark = pytest.mark.slow

RELEASE = tuple(int(number) for number in torch.__version__.split(".")[:2])
ALWAYS = {"SGD dampening fused": "keeps an undefined momentum"}
SHARDED = {
    **ALWAYS,
    **{name: f"{name} computes with whole tensors" for name in ("LBFGS", "Adafactor", "Muon")},
    **{f"{name} fused": f"torch has no fused {name} for shards" for name in ("SGD", "Adagrad")},
    "SGD dampening fused": "torch has no fused SGD for shards",
}


@pytest.mark.parametrize(
    ("strategy", "precision", "refused"),
    [
        ("ddp", "32-true", ALWAYS),
        ("sharded", "32-true", SHARDED),
        pytest.param("sharded_gradients", "16-mixed", SHARDED, marks=pytest.mark.faults),
    ],
)
def test_each_optimiser_trains_or_is_refused(
    gpu_pool: Any, tmp_path: Path, strategy: str, precision: str, refused: dict[str, str]
) -> None:
    program = "tests.standin.optimizers:main"
    code, output = gpu_pool.run(tmp_path, strategy, precision, ranks=2, program=program)
    assert code == 0, output
    outcomes = json.loads((tmp_path / "optimizers-0.json").read_text())
    lacking = {name for name, outcome in outcomes.items() if outcome == NOT_IN_THIS_TORCH}
    assert lacking <= ({"Adagrad fused", "Rprop"} if RELEASE < (2, 15) else set())
    for name in outcomes.keys() - lacking:
        assert refused.get(name, "trained") in outcomes[name], name
    assert outcomes == json.loads((tmp_path / "optimizers-1.json").read_text())
