"""The verbs, with a line about each: `--help` and the completion show them, and load no library for it."""

import argparse
import textwrap
from collections.abc import Mapping
from difflib import get_close_matches
from typing import NoReturn

from project.errors import UserError

VERBS = {
    "fit": "trains, or resumes a run that exists",
    "validate": "computes the validation metrics of a run's checkpoint",
    "test": "computes the test metrics of a run's checkpoint",
    "predict": "writes what a run's checkpoint predicts for each sample",
    "doctor": "checks hosts, network, data and model before a run",
    "export": "writes a run's weights as safetensors, ONNX or torch.export",
    "manifest": "prints a Kubernetes manifest for a run",
    "ray": "starts a fit, or a sweep, on a Ray cluster",
    "sweep": "shows the trials of a sweep",
    "prove": "tests that a YAML trains the same run, killed or not, on other numbers of ranks",
    "runs": "lists the runs, and removes those that are not needed",
    "watch": "follows a run that trains elsewhere",
    "report": "writes a page about a run, and one that compares several",
    "profile": "records where the time of a running run goes",
    "same": "reports whether runs are the same to the last bit",
    "config": "shows the differences between two configurations",
    "schema": "prints the JSON schema of the YAML, for editors",
    "completion": "prints the completion of verbs, keys and runs for bash or zsh",
    "bench": "measures a config against a plain PyTorch loop (in a checkout)",
}
ABOUT = "One training run from one YAML: on one machine or on many, killed or not, the run is the same."
_PAGE = """\
usage: python -m project VERB [--KEY VALUE ...]

{about}

{verbs}

  python -m project fit --config configs/ddp.yaml      a run to begin with
  python -m project VERB --help                        what a verb takes; --help_all: each key of a training
  python -m project --version
The command samerun is the same program.
"""


MATTERS = (
    *("config", "run", "resume", "change", "doctor", "dry_run", "debug", "seed_everything", "ckpt_path"),
    *("to", "out", "batch_size"),
    *("trainer.max_epochs", "trainer.max_steps", "trainer.max_time", "trainer.devices", "trainer.num_nodes"),
    *("trainer.accelerator", "trainer.precision", "trainer.strategy", "trainer.accumulate_grad_batches"),
    *("trainer.val_check_interval", "trainer.limit_train_batches", "trainer.limit_val_batches", "trainer.log_every_n_steps"),
    *("trainer.global_batch_size", "trainer.exact", "trainer.threads", "trainer.gradient_clip_val", "trainer.logger"),
    *("trainer.callbacks", "trainer.nonfinite"),
    *("model.network", "model.optimizer", "model.lr_scheduler", "model.lr_scaling", "model.lr_reference_batch"),
    *("model.label_smoothing", "model.compile", "data.source", "data.batch_size", "data.global_batch_size"),
    *("data.crop_padding", "data.flip", "data.num_workers", "checkpoints.every_n_steps", "checkpoints.every_n_minutes"),
    *("checkpoints.keep_last", "checkpoints.monitor", "checkpoints.mode", "watchdog.at_least"),
    *("recover.restarts", "recover.every_n_steps", "notify.webhook", "notify.command", "metrics.port"),
)
"""The keys that `fit --help` shows; `--help_all` shows the rest."""
_HELP = """\
usage: python -m project {verb} --config CONFIG [--KEY VALUE ...]

{about} The most important keys follow, with their defaults; a config may hold them, too. See also
  python -m project {verb} --help_all                 every key
  python -m project {verb} --data.source.help CLASS   what a class takes, for each key that takes a class_path
  python -m project {verb} --config X --print_config  a configuration, complete
Complete, commented configs: configs/*.yaml.
"""


def page() -> str:
    """Returns the text of `python -m project --help`."""
    width = max(map(len, VERBS))
    return _PAGE.format(about=ABOUT, verbs="\n".join(f"  {verb:{width}}  {text}" for verb, text in VERBS.items()))


def refuse_verb(verb: str) -> NoReturn:
    """Raises the error of a verb that there is not, or of none at all."""
    near = get_close_matches(verb, VERBS, n=1)
    text = f"There is no verb {verb!r}.{f' Did you mean {near[0]}?' if near else ''}" if verb else "No verb is given."
    raise UserError(f"{text} Choose from {', '.join(VERBS)}. HINT: python -m project --help")


def sentence(verb: str) -> str:
    """Returns what a verb does, as a sentence."""
    return f"{VERBS[verb][:1].upper()}{VERBS[verb][1:]}."


def verb_page(verb: str, keys: Mapping[str, tuple[object, str]]) -> str:
    """Returns the text of `python -m project VERB --help`, of keys with their defaults and explanations."""
    lines = [_HELP.format(verb=verb, about=sentence(verb))]
    for key in (key for key in MATTERS if key in keys):
        default, explanation = keys[key]
        default = default.get("class_path") if isinstance(default, Mapping) else getattr(default, "class_path", default)
        text = explanation.split("Default:")[0].partition("\n\n")[0].replace("``", "")
        lines.append(f"  --{key}" + ("" if default in (None, argparse.SUPPRESS) else f" {default}"))
        lines += textwrap.wrap(textwrap.shorten(text, 240), 110, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines) + "\n"
