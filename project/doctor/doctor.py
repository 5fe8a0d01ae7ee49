"""Checks whether this cluster is fit for this run, and if not, where the fault lies: `python -m project doctor --config
...`."""

from project.doctor import hosts, links, training
from project.doctor.examination import Examination


def examine(this: Examination) -> None:
    """Runs all checks, in the order in which one needs the results of another."""
    hosts.versions(this)
    hosts.hardware(this)
    hosts.gpus(this)
    links.interfaces(this)
    training.data(this)
    hosts.run_folder(this)
    hosts.limits(this)
    hosts.clocks(this)
    links.collectives(this)
    if this.fast:
        return
    links.speed(this)
    if not this.has_data:
        return
    step = training.compute(this)
    if step is not None:
        training.memory(this)
        links.gradient_sync(this, step)
    training.loader(this, step)
