"""Slots in the memory of a GPU: uploads on streams of their own, and Forwards as CUDA graphs over fixed addresses."""
