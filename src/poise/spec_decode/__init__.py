"""Speculative decoding: who drafts, how much, and by which rule a draft becomes a token."""
