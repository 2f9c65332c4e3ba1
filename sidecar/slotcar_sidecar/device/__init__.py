"""Slots on a device: what fills them and what computes with them."""
