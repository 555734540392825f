"""Who writes which box where: worked out together once, then cached while the structure is
constant.
"""
