"""Readers of drafter checkpoints: one file per layout, recognised by content."""
