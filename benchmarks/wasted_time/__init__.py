"""What failures cost: a simulation of remote storage, of GEMINI's rule and of the memory tier."""
