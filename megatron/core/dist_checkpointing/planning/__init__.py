"""Which rank writes which box to which file: planned once, cached while the structure is
constant.
"""
