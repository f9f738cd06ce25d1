"""Prompts: sources, files in verl's schema, encoding with the chat template, and their order over epochs."""
