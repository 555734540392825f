"""Reporting of a run: log, TensorBoard, record, timers, traces, memory."""
