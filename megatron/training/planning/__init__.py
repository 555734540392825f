"""What a run will need (memory, bubble, traffic), worked out from its flags without running it."""
