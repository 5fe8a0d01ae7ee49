"""What a file of fingerprints says, whole or damaged, and what is said of two of them."""

import json
import struct
from dataclasses import replace

import pytest

from project.errors import UserError
from project.untrusted import cut_off_half_a_line
from project.watch.comparison import compare, compare_with_itself, surroundings
from project.watch.fingerprint_file import FILE, Recorded, Start, Step, read
from project.watch.history import Life

NAMES = ("body.0.weight", "body.1.weight", "head.weight", "head.bias")
START = Start(0, 2, 4, False, "2.12", "a CPU", 1, NAMES, "0" * 16, b"abcd")
MODULES = (("body.0 (Linear)", b"AA"), ("body.1 (Linear)", b"BB"), ("head (Linear)", b"CC"))


def step(number: int, **fields) -> Step:
    losses = {micro_batch: bytes([number, micro_batch, 0, 1]) for micro_batch in range(4)}
    made = Step(number, 0, 2, f"{number:016x}", bytes([number, 2, 3, 4]), losses, MODULES if number == 1 else ())
    return replace(made, **fields)


def run(*starts, name: str = "a") -> Recorded:
    return Recorded(name, starts)


def steps(*numbers: int, **replaced: Step) -> list[Step]:
    return [replaced.get(f"s{number}", step(number)) for number in numbers]


A = run((START, steps(1, 2, 3, 4)))


def report(first: Recorded, second: Recorded) -> str:
    verdict = compare(first, second)
    assert verdict is not None
    assert not verdict.same
    return " ".join(" ".join(verdict.lines).split())


# Files ---------------------------------------------------------------------------------------------------------------


def write(folder, *lines: str) -> None:
    (folder / FILE).write_text("".join(lines))


def test_what_is_written_is_read(tmp_path):
    odd = step(3, losses={0: b"\0\1\2\3", 3: b"\4\5\6\7"}, others={"1": "f" * 16}, modules=MODULES)
    none = step(4, losses={})
    write(tmp_path, START.line(), *(part.line(4) for part in (step(1), step(2), odd, none)))
    recorded = read(tmp_path, "a")
    assert recorded.starts == [(START, [step(1), step(2), odd, none])]
    assert [recorded.steps[3].rank_of(number) for number in range(4)] == [0, 0, 1, 1]
    assert [recorded.steps[number].before for number in (1, 2)] == [START.weights, step(1).weights]


def test_half_a_line_at_the_end_is_left_out_and_cut_off(tmp_path):
    write(tmp_path, START.line(), step(1).line(4), step(2).line(4)[:40])
    assert list(read(tmp_path, "a").steps) == [1]
    cut_off_half_a_line(tmp_path / FILE)
    assert (tmp_path / FILE).read_text() == START.line() + step(1).line(4)
    cut_off_half_a_line(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("", "holds no step"),
        (START.line(), "holds no step"),
        (START.line() + step(1).line(4)[:50] + "\n" + step(2).line(4), "line 2: this is no fingerprint"),
        (step(1).line(4), "line 1: this is no fingerprint"),
        ("[1]\n", "line 1: this is no fingerprint"),
        (START.line().replace('"ranks":2', '"ranks":0'), "line 1: this is no fingerprint"),
        (START.line() + step(1).line(4).replace('"losses":"', '"losses":"?'), "line 2: this is no fingerprint"),
        ("\0\xff\n", "line 1: this is no fingerprint"),
        (START.line().replace('"format":1', '"format":9'), "of another version of this project .format 9, not 1."),
    ],
)
def test_a_file_that_can_not_be_read_says_why(tmp_path, content, what):
    with pytest.raises(UserError, match=r"older version.*HINT"):
        read(tmp_path, "a")
    write(tmp_path, content)
    with pytest.raises(UserError, match=what) as caught:
        read(tmp_path, "a")
    assert "HINT" in str(caught.value)


def test_every_cut_and_every_lost_byte_is_read_or_refused(tmp_path):
    content = (START.line() + step(1).line(4) + step(2).line(4)).encode()
    for at in range(len(content)):
        for damaged in (content[:at], content[:at] + content[at + 1 :], content[:at] + b"\xfe" + content[at + 1 :]):
            (tmp_path / FILE).write_bytes(damaged)
            try:
                compare(A, read(tmp_path, "b"))
            except UserError:
                continue


# One run -------------------------------------------------------------------------------------------------------------


def test_a_run_that_went_on():
    later = replace(START, step=2, weights=step(2).weights)
    resumed = run((START, steps(1, 2, 3, 4)), (later, steps(3)))
    assert list(resumed.steps) == [1, 2, 3], "step 4 is to be taken again"
    verdict = compare_with_itself(resumed)
    assert verdict.same
    assert "step 3 was computed more than once, the same" in verdict.lines[0]
    assert compare_with_itself(A).lines == ["a: 4 steps up to 4, and none was computed twice."]
    lives = [Life(0.0, 0, 1, {}, 9.0, 4), Life(9.0, 2, 1, {}, 18.0, 6)]
    assert compare_with_itself(resumed, lives).lines[1].startswith("  Not compared, of what was computed twice: 4; the start")
    unseen = compare_with_itself(A, lives)
    assert unseen.lines[0] == "a: 4 steps up to 4, and those that were computed twice can't be compared."
    assert unseen.lines[1].startswith("  Not compared, of what was computed twice: 3 to 4, 2 steps; the start")
    diverged = run((START, steps(1, 2, 3, 4)), (later, steps(3, 4, s4=step(4, weights="f" * 16, tensors=bytes([4, 9, 3, 4])))))
    verdict = compare_with_itself(diverged)
    assert not verdict.same
    text = " ".join(verdict.lines)
    assert "step 4 was computed twice, with different results" in text
    assert "1 of 4 tensors differ: body.1.weight" in text
    elsewhere = run((START, steps(1, 2, 3)), (replace(later, weights="e" * 16), steps(3, s3=step(3, weights="f" * 16))))
    assert "others already" in compare_with_itself(elsewhere).lines[1]


# Two runs ------------------------------------------------------------------------------------------------------------


def test_the_same_on_other_ranks_and_not_as_far():
    start = replace(START, ranks=1)
    verdict = compare(A, run((start, [replace(part, ranks=1) for part in steps(1, 2)]), name="b"))
    assert verdict.same
    assert verdict.lines == ["a and b are the same to the last bit up to step 2, on 2 and 1 ranks; a goes on to step 4."]
    verdict = compare(A, run((START, steps(1, 2, 3, 4)), name="b"))
    assert verdict.lines == ["a and b are the same to the last bit up to step 4 of both, on 2 ranks each."]
    assert compare(A, run((replace(START, step=9), steps(10)))) is None
    unknown = step(2, losses={0: step(2).losses[0]})  # losses of other ranks of a run that failed
    assert compare(A, run((START, steps(1, 2, s2=unknown)), name="b")).same


def test_another_network():
    text = report(A, run((replace(START, names=("body.0.weight", "tail.weight")), steps(1)), name="b"))
    assert "only a has body.1.weight, head.weight, head.bias; only b has tail.weight" in text


def test_the_forward_pass():
    losses = {**step(1).losses, 0: b"else", 3: b"else"}
    modules = [MODULES[0], (MODULES[1][0], b"XX"), (MODULES[2][0], b"YY")]
    text = report(A, run((START, steps(1, s1=step(1, losses=losses, weights="f" * 16, modules=modules))), name="b"))
    assert "step 1 (epoch 1) is the first that differs" in text
    assert "the loss of micro-batch 0 (and those of 1 more) is not: it is the forward pass" in text
    assert "Micro-batch 0 was computed by rank 0 of 2 in both" in text
    assert "The first module that gave something else, in micro-batch 0: body.1 (Linear)" in text
    assert "after body.0 (Linear), which gave the same." in text
    assert "The mean loss of step 1, the last of both, is" in text
    text = report(A, run((START, steps(1, s1=step(1, losses=losses))), name="b"))
    assert "All modules gave the same in micro-batch 0" in text
    text = report(A, run((START, steps(1, s1=step(1, losses={**step(1).losses, 3: b"else"}))), name="b"))
    assert "computed by rank 1 of 2 in both" in text
    assert "in micro-batch 0 alone, whose loss is the same" in text


def test_the_forward_pass_of_a_step_without_modules_on_other_ranks():
    start = replace(START, ranks=1)
    parts = [replace(part, ranks=1) for part in steps(1, 2, 3, s3=step(3, losses={**step(3).losses, 2: b"else"}))]
    text = report(A, run((start, parts), name="b"))
    assert "computed by rank 1 of 2 in the one, rank 0 of 1 in the other" in text
    assert "after every 100th step. The latest that both have is step 1, and there all gave the same." in text


@pytest.mark.parametrize(
    ("loss", "reference", "rounded"),
    [(2.3, 2.3001, True), (2.3, 2.5, False), (2.3, float("nan"), True), (1e-6, 1.1e-6, True), (1e-6, 0.01, False)],
)
def test_a_loss_that_differs_by_more_than_rounding_is_of_other_samples(loss, reference, rounded):
    first, second = (step(1, losses={0: struct.pack("<f", value)}, weights=f"{value}") for value in (loss, reference))
    verdict = compare(run((START, [first])), run((START, [second]), name="b"))
    assert verdict.rounded is rounded
    assert any("more than rounding: other samples (another order, other data)" in line for line in verdict.lines) is not rounded


def test_what_follows_the_forward_pass():
    text = report(A, run((START, steps(1, 2, s2=step(2, weights="f" * 16, tensors=bytes([2, 2, 9, 9])))), name="b"))
    assert "all losses in it are the same, and the weights after it are not: it is the backward pass or the optimiser" in text
    assert "2 of 4 tensors differ: head.weight, head.bias. The first belongs to head (Linear)." in text
    text = report(A, run((START, steps(1, 2, s2=step(2, weights="f" * 16))), name="b"))
    assert "Which tensors differ is not known" in text


def test_steps_without_losses():
    """A training_step that steps its optimisers by itself may return none."""
    first, second = (run((START, [step(1, losses={}, weights=weights)])) for weights in ("1" * 16, "2" * 16))
    text = report(first, second)
    assert "No loss of it is on record." in text
    assert "all losses" not in text


def test_what_else_differs():
    assert surroundings(START, START) == []
    assert surroundings(START, replace(START, exact=True, ranks=1))[0].startswith("trainer.exact: False, and True")
    (line,) = surroundings(START, replace(START, ranks=3))
    assert "HINT: trainer.exact: true" in line
    exact = replace(START, exact=True)
    assert surroundings(exact, replace(exact, ranks=3)) == ["ranks: 2, and 3."]
    assert surroundings(START, replace(START, ranks=3, threads=4), explain=False) == ["threads: 1, and 4.", "ranks: 2, and 3."]
    lines = surroundings(START, replace(START, torch="2.13", device="a GPU", threads=4, micro_batches=8))
    assert [line.partition(":")[0] for line in lines] == ["A step has 4 micro-batches, and 8", "torch", "hardware", "threads"]


def test_a_line_is_short():
    large = replace(step(50), tensors=bytes(105), losses={number: bytes(4) for number in range(8)})
    assert len(large.line(8)) < 300
    assert json.loads(large.line(8)).keys() == {"step", "epoch", "ranks", "weights", "tensors", "losses"}


def test_a_step_that_follows_from_the_number_of_ranks_is_the_first_cause():
    alone = replace(START, ranks=1, micro_batches=2)
    second = run((alone, steps(1, s1=step(1, weights="f" * 16))))
    verdict = compare(run((START, steps(1))), second)
    assert "A step has 4 micro-batches on 2 rank(s), and 2 on 1" in verdict.lines[1]
    assert "HINT: trainer.global_batch_size" in verdict.lines[1]
    assert not any("micro-batches" in line for line in surroundings(START, alone))


def test_how_far_apart_two_runs_are_in_the_end():
    """By the losses of the last step that both have, of the micro-batches that both have."""
    near, far = ({number: struct.pack("<f", loss + number) for number in range(2)} for loss in (1.0, 1.5))
    first = run((START, steps(1, 2, s1=step(1, losses=near), s2=step(2, losses=near))))
    second = run((START, steps(1, 2, s1=step(1, losses=far), s2=step(2, losses={1: far[1]}))), name="b")
    assert "The mean loss of step 2, the last of both, is 2, and 2.5." in report(first, second)
