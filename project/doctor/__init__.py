"""Is the cluster fit for this run?"""
