"""Benchmarks: one module a question. Each prints one JSON line last and measures its peers in the same run."""
