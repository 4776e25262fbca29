"""The bootstrap service."""
