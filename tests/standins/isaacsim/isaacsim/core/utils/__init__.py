"""Parts that need a running Kit."""
