"""Speculative decoding: who drafts, and how much. What is accepted is decided where tokens are drawn."""
