"""Programs of several real processes."""
