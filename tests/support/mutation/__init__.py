"""Mutations of a repository's files: its fixture, the mutations, and the judge of each."""
