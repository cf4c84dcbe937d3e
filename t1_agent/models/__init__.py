"""Models: the tiny MoE actor, the critic and their container. Importing this package loads no torch; its modules do."""
