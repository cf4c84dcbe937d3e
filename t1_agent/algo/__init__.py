"""The mathematics of the actor-critic: pure functions over arrays and tensors, each with an analytic test.

``gae`` and ``advantages`` work on numpy arrays of whole episodes (they run once a batch, before any gradient), ``losses`` on flat torch
tensors that hold trainable tokens only, ``mismatch`` and ``statistics`` produce what is logged. Nothing here knows a model or a file.
"""
