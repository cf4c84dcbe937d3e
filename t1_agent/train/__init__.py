"""Training: batches, the learner, warm starts, the loop, checkpoints and the run directory. Importing this package loads no torch."""
