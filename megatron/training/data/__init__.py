"""From datasets and tokenizers to micro-batches."""
