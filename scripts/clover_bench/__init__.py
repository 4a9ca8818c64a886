"""Benchmarks: two things timed in turn in one run, and the checkpoints they need."""
