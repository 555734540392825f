"""What a run is: options as dataclass fields, their flags, and the rules between them."""
