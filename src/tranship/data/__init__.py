"""Prompts: sources and their rows, recorded responses, encoding with the chat template, order over epochs, mixtures."""
