"""`t1-agent`: parses and calls, nothing else."""
