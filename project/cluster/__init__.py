"""The hosts, launchers and networks on which a run trains."""
