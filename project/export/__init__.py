"""Writes a run's weights as files that load without this package, and checks them.

`export.py` is the way from an evaluation to a folder; `capture.py` takes weights and inputs from that evaluation, `formats.py`
writes safetensors, ONNX and torch.export, `check.py` has a fresh process load the file and compares the outputs. It must not
know how a run is trained: neither the step nor the launcher, only a checkpoint and an evaluation.
"""
