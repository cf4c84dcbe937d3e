"""Rollout: one episode, many episodes at once, and episodes on disk."""
