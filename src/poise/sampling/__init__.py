"""From a row of logits to a token: the sampler's row records and the numpy twin of the native sampler.

Knows nothing of schedulers, models or text. Invariant: a row's token depends on that row alone.
"""
