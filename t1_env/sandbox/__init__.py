"""Sandboxes: private machines for one episode. Imports nothing beyond the standard library."""
