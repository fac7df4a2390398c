"""Arrays on their way from storage to leaves: in bounded memory, watched, and cancelled on request."""
