"""Benchmarks of pallas_attn beside its peers: `python -m benchmarks.run`."""
