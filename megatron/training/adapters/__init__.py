"""Low-rank adapters on a frozen base model (`--lora-rank`)."""
