"""The ring plane, and the choice of the transport, against a sidecar that does as it is told."""
