"""Requirements of a run (memory, bubble, traffic), computed from its flags without running it."""
