"""Engines that turn prompts of token ids into sampled completions. Importing this package loads no torch; its modules may."""
