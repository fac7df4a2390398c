"""Fuzzing: targets of cargo-fuzz (`fuzz_targets/`), and whole paths through Python (`open_path/`)."""
