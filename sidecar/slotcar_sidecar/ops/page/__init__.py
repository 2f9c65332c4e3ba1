"""The status page: a state as one HTML document that needs nothing else, and changes nothing."""

from slotcar_sidecar.ops.page.rendering import Page, render

__all__ = ["Page", "render"]
