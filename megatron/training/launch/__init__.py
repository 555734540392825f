"""From a process and its environment to a rank of the run."""
