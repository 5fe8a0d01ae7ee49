"""WHERE it is trained."""
