"""The crash test's writer, its oracle, and its ways to crash a server."""
