"""How the processes of one program agree: `current` finds the coordinator, `base` says what one is."""
