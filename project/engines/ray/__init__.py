"""Ray: it places the workers, starts them again, and searches. Nothing here is imported unless somebody says `ray`."""
