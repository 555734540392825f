"""Read boxes of stored tensors into live ones, at any layout."""
