"""The front door: the parser, what is said of a wrong key, and a file for each verb that reads a run."""
