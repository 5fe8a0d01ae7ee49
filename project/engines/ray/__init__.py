"""Ray places a run's ranks on hosts, starts them again after a failure, and searches: the verb `ray`."""
