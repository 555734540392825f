"""A checkpoint of any format as named global tensors, and what a model and a layout need of them."""
