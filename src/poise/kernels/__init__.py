"""The operations that models are made of: vocabulary (`ops`), numpy specification (`reference`), backends (`cpu`)."""
