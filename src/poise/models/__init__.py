"""Model families as functions over the operations of `kernels/ops`, their configuration and their cost."""
