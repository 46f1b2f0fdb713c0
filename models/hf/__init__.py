"""Conversion between our models and architectures of Hugging Face `transformers`."""
