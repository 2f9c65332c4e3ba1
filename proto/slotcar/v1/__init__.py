"""Generated code of the slotcar.v1 API; see docs/api.md."""
