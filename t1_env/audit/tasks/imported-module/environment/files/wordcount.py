"""Words of a text."""


def count(text):
    raise NotImplementedError


def top(text, n):
    raise NotImplementedError


def longest(text):
    raise NotImplementedError
