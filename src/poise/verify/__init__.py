"""Proofs: that what should not change an answer doesn't, and what what may change it costs. Nothing imports this room."""
