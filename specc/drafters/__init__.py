"""Drafter modules and their configurations: what a checkpoint is read into and a method drafts with."""
