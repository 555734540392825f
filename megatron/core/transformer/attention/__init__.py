"""How tokens see each other: projections and positions, masks, kernels, and sequences that are
split over ranks.
"""
