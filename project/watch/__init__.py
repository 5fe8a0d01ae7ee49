"""The room of what you see: console, curves, events, report, profiles, fingerprints and the comparison of runs."""
