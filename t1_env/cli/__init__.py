"""``t1-env``: the command line of the environment. Parses and calls, nothing else."""
