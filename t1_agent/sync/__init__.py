"""Trainer to engine: weight pushes with a version and a verified checksum. Importing this package loads no torch."""
