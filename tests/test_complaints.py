"""A wrong flag or key is told in a line: which key, what it is, what it would have to be, and the flag or the YAML's line."""

import random
import re
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import yaml

import project.cli.main
import project.cli.project_cli
from project.cli.complaints import complaint
from tests.conftest import ROOT, forked

DDP = str(ROOT / "configs/ddp.yaml")
CALLBACK = "{class_path: EarlyStopping, init_args: {monitor: val/acc, patience: x}}"
PATIENCE = "trainer.callbacks.init_args.patience: Expected an int, and it is x"
FLAGS = {  # and what is said of them
    "--data.source.init_args.train_size=abc": "--data.source.init_args.train_size: Expected an int, and it is abc",
    "--data.source.train_size=abc": "--data.source.init_args.train_size: Expected an int, and it is abc",
    "--model.optimizer.init_args.lr=abc": "--model.optimizer.init_args.lr: Expected a float, and it is abc",
    "--model.optimizer.init_args.lr=.nan": "--model.optimizer.init_args.lr=nan is of no use to a run",
    "--model.optimizer.init_args.lr=.inf": "--model.optimizer.init_args.lr=inf is of no use to a run. HINT: write a finite",
    "--watchdog.at_least=.nan": "--watchdog.at_least=nan is of no use to a run",
    "--model.network.init_args.widths=[8,x]": "--model.network.init_args.widths: Expected an int, and it is x",
    "--trainer.max_epochs=many": "--trainer.max_epochs: Expected an int, and it is many",
    f"--trainer.callbacks=[{CALLBACK}]": f"--trainer.callbacks: {PATIENCE}",
    "--checkpoints.every_n_steps=x": "--checkpoints.every_n_steps: Expected an int, and it is x",
    "--watchdog.factor.lr=3": "There is no key watchdog.factor.lr",
    "--recover.limit=3": "There is no key recover.limit. There are: restarts, every_n_steps, strikes.",
    "--checkpoints.mode=up": "--checkpoints.mode: checkpoints.mode is 'min' or 'max', and not 'up'",
    "--trainer.devices=x": "--trainer.devices: The trainer's settings don't work here: `devices` selected with",
    "--trainer.max_time=x": "--trainer.max_time: The trainer's settings don't work here: trainer.max_time=x",
    "--model.network=project.MiniRezNet": "There is no project.MiniRezNet. Did you mean project.model.MiniResNet?",
    "--model.network=MiniRezNet": "Expected the path of a class, as in module.MiniRezNet. Did you mean MiniResNet?",
    "--model.network=torchvision.modls.resnet18": "no torchvision.modls.resnet18. Did you mean torchvision.models.resnet18?",
    "--model.optimizer=torch.optim.sgd": "--model.optimizer: There is no torch.optim.sgd. Did you mean torch.optim.SGD?",
    "--data.source=besides.X": "There is no besides.X, as there is no module besides. HINT: besides.py is in sub: start",
    "--model.network=brken.Net": "as there is no module brken. Did you mean broken.Net?",
    "--model.network=broken.Net": "broken.py, line 1: SyntaxError: '(' was never closed",
    "--model.network=lacking.Net": "lacking.py, line 1, in <module>: No module named 'x_y'. HINT: pip install x_y",
    "--model.network=raising.Net": "raising.py, line 1, in <module>: ZeroDivisionError: division",
    "--ckpt_path=nope.ckpt": "--ckpt_path: ckpt_path=nope.ckpt: there is no such checkpoint.",
}
SECTIONS = {
    "data: {source: {init_args: {train_size: abc}}}": "data.source.init_args.train_size: Expected an int, and it is abc",
    "trainer: {callbacks: [" + CALLBACK + "]}": PATIENCE,
    "trainer: [1, 2]": "trainer holds keys and values, as in 'trainer: {KEY: VALUE}', and it is [1, 2].",
    "dashboard:": "dashboard holds keys and values",
    "data:": "data holds keys and values",
    "model: {optimizer: {init_args: {weight_decay: .nan}}}": "model.optimizer.init_args.weight_decay=nan is of no use",
    "trainer: {callbacks: [{class_path: EarlyStopping, init_args: {monitor: val/acc, min_delta: .nan}}]}": "min_delta=nan",
    "model: {optimizer: {init_args: 3}}": "model.optimizer: Its init_args hold keys and values",
    "trainer: {plugins: {a: b}}": "There is no key trainer.plugins.init_args.a",
}
WRONG = ("abc", "[1, x]", "{a: b}", "x.y.Z", "{class_path: no.Such}", "{init_args: {foo: 1}}", "[[")


class Accepted(Exception):
    """Nothing was wrong with it, and nothing is trained."""


def accept(*_):
    raise Accepted


def keys(section, above=""):
    for name, value in section.items():
        yield f"{above}{name}"
        if isinstance(value, dict):
            yield from keys(value, f"{above}{name}.")


def say(*words):
    print("CASE", *words[1:], file=sys.stderr, flush=True)
    sys.argv = ["project", "fit", *words]
    try:
        project.cli.main.main()
    except SystemExit as end:
        print("EXIT", end.code, file=sys.stderr, flush=True)


def all_complaints():
    """All of them in one process: what is fixed above, and a sample of what may be wrong anywhere."""
    project.cli.project_cli.ProjectCLI.before_fit = accept
    sys.path.insert(0, "")
    Path("sub").mkdir()
    for name, text in {"broken": "class Net(", "lacking": "import x_y", "raising": "1 / 0", "sub/besides": ""}.items():
        Path(f"{name}.py").write_text(text)
    for flag in FLAGS:
        say(f"--config={DDP}", flag)
    for number, section in enumerate(SECTIONS):
        Path(f"{number}.yaml").write_text(f"base: {DDP}\n{section}\n")
        say("--config", f"{number}.yaml", "--run=x")
    shown, sys.argv = StringIO(), ["project", "fit", f"--config={DDP}", "--print_config"]
    with redirect_stdout(shown), pytest.raises(SystemExit):
        project.cli.main.main()
    draw = random.Random(1)
    known = [key for key in keys(yaml.safe_load(shown.getvalue())) if "." in key and not key.endswith(("_args", "class_path"))]
    for _ in range(15):
        key, kind = draw.choice(known), draw.choice(("flag", "yaml", "unknown"))
        if kind == "yaml":
            node = yaml.safe_load("abc")
            for part in reversed(key.split(".")):
                node = {part: node}
            Path("any.yaml").write_text(yaml.safe_dump({"base": DDP, **node}))
            say("--config", "any.yaml", f"--run=x{draw.random()}")
        else:
            say(f"--config={DDP}", f"--{key}s=1" if kind == "unknown" else f"--{key}={draw.choice(WRONG)}")


def test_what_is_wrong_is_told_with_its_place(tmp_path):
    output = forked(tmp_path, program="tests.test_complaints:all_complaints").output
    cases = [case for case in output.split("CASE ")[1:] if "Accepted" not in case]
    assert len(cases) > len(FLAGS) + len(SECTIONS) + 5
    assert {*FLAGS, *(f"{at}.yaml --run=x" for at in range(len(SECTIONS)))} <= {case.partition("\n")[0] for case in cases}
    for case in cases:
        words, _, printed = case.partition("\n")
        assert "Traceback" not in printed, case
        (line,) = re.findall(r" ERROR +(.*)", printed)
        key = re.search(r"--([\w.]+?)s?=", words) if words.startswith("--") and "--run" not in words else None
        assert key is None or key[1].rpartition(".")[2].removesuffix("s") in line, case
        if "--run" in words:
            assert re.search(r"\w+\.yaml, line \d+: \w", line), case
        wanted = FLAGS.get(words) or next((text for at, text in enumerate(SECTIONS.values()) if f"{at}.yaml " in words), "")
        assert wanted in line, case


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (
            ("a.b", "Subtypes: [<class 'int'>]", "Errors:", "  - Expected a <class 'int'>", "Given value: x"),
            "Expected an int, and it is x",
        ),
        (
            ("a", "Problem with given class_path 'm.C':", '  Parser key "n":', "    Expected a <class 'int'>. Got value: y"),
            "init_args.n: Expected an int, and it is y",
        ),
        (
            ("a", "Problem with given class_path 'm.C':", "  module 'm' has no attribute 'C'"),
            "m.C: module 'm' has no attribute 'C'",
        ),
        (
            (
                "a",
                "Subtypes:",
                "Errors:",
                "  - Expected a typing.Literal['x', 'y']",
                "  - Expected a collections.abc.Iterable. Got value: z",
            ),
            "Expected one of 'x', 'y'; Expected a list, and it is z",
        ),
    ],
)
def test_the_innermost_complaint_is_what_counts(lines, text):
    key, *rest = lines
    assert ": ".join(filter(None, complaint("\n  ".join([f'Parser key "{key}":', *rest])))) == text


def test_a_timer_needs_no_interval(quick):
    """Its default is a word of a class of Lightning's, for which YAML has no form."""
    run = quick("fit", f"--config={DDP}", "--trainer.callbacks=lightning.pytorch.callbacks.Timer", "--print_config")
    assert yaml.safe_load(run.output)["trainer"]["callbacks"]["init_args"]["interval"] == "step"
