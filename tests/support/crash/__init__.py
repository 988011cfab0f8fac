"""The crash test's writer, its oracle, and the ways in which it crashes a server."""
