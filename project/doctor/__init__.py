"""The doctor: checks whether the cluster is fit for this run."""
