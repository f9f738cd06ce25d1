"""Model folders: fetching, converting, making and checking them, and their tokenizers. Loads no weights to train."""
