"""Ends a run cleanly, whatever happens to it.

`signals.py` notes signals from the first moment on, `preemption.py` stops all ranks at the same step, `requeue.py` puts a job
back into Slurm's queue, `nonfinite.py` acts on losses and gradients that are not finite, `failure.py` reports the cause once,
`life.py` writes into the run's folder what a rank can't any more. It acts through callbacks and threads beside the training: it
must not know the model, the data, or what is shown of a run, and the step must not know it. What is imported before PyTorch
needs the standard library alone.
"""
