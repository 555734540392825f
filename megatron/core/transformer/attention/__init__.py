"""Attention: projections and positions, masks, kernels, and sequences split over ranks."""
