"""What a run reports: the log, TensorBoard, timers, traces, memory."""
