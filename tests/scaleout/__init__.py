"""A pool of sidecars behind a real Envoy, with the configuration of deploy/kustomize/overlays/pool."""
