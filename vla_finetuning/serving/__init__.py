"""Serve policies to robots and benchmarks: two protocols, sessions, batches on Ray Serve."""
