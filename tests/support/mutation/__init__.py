"""Mutations of a repository's files: the fixture, the mutations, and their judge."""
