"""An outpost: T1's own small server at the far end of a connection, which serves a sandbox and its shells beside where they run.

A terminal cannot be driven through a connection alone: whether a program waits for input, which modes the terminal is in and what to
kill are questions for the kernel it runs on. So the driver runs over there, and one request and one answer cross the connection for each
step.
"""
