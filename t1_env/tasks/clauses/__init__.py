"""Clauses that families compose their instances from.

A clause says one line of the instruction and adds everything that belongs to it: files, oracle steps with their slips, and tests. A test
that something stayed as it was always asserts the deliverable first, so that doing nothing passes no test. A slip never uses a name that
the agent cannot have seen by then.
"""
