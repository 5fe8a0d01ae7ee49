"""The weights go out: files that others load without this package, and that were checked."""
