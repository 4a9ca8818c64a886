"""Convert Hugging Face checkpoints of Clover and Qwen3.5/3.6-MoE models to GGUF."""

from clover_convert.conversion import convert

__all__ = ["convert"]
