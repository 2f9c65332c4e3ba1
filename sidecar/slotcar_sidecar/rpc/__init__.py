"""gRPC: translates between messages and the cache, and nothing else."""
