"""What each other system calls our keys, one file a system. `tranship.config.vocabulary` puts them together."""
