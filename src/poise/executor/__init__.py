"""Runs what the scheduler decided: batches as arrays, KV pages, one native call per step."""
