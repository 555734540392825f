"""The options of a run as dataclass fields, their command-line flags, and the rules between them.

Stable interface: `parsing.parse_args(argv, world_size)` returns a `Config`, or raises ValueError
that lists all problems.
"""
