"""The laboratory: an honest load generator, its statistics, its gates and the records it leaves.

Speaks HTTP to any OpenAI-compatible server and knows nothing of poise's own engine. Invariant: what was offered is never
forgotten; a request that failed is a miss, not a hole in the sample.
"""
