"""When a run saves and when it ends."""
