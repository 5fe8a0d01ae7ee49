"""Shows that a run is a function of its YAML: shortened runs are forked, killed, resumed and compared."""
