"""In-process restart: after a failure only the lost rank gets a new process."""
