"""A checkpoint of any format as named global tensors, and the parts that models and layouts
need.
"""
