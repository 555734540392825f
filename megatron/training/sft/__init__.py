"""Supervised fine-tuning: datasets of conversations with loss masks (--sft)."""
