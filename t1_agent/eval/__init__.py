"""Evaluation: results with intervals, the sampler-against-trainer table, and the report of a run."""
