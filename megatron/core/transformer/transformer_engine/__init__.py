"""Building blocks from Transformer Engine, which use the parameters of the local ones."""
