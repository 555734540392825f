"""The building blocks from Transformer Engine, over parameters and boxes of the local ones."""
