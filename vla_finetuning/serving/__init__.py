"""A policy behind a server: sessions of robots and benchmarks, batches on Ray Serve."""
