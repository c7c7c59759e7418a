"""Files of models and their tokenizers, read without torch."""
