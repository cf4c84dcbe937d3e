"""``t1-env bench``: what T1 costs on this machine, beside its floors and its peers.

A *benchmark* measures a few things in turn (``measure.interleave``) and keeps the samples as *series*; *figures* are made of series by
stated rules. Ratios pair what was measured right after one another. ``runner.run`` is the entry point; docs/benchmarks.md is the manual.
"""
