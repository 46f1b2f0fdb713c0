"""Models of this project as architectures of Hugging Face `transformers`, and back."""
