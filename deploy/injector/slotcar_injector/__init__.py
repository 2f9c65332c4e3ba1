"""Kubernetes' mutating admission webhook that puts slotcar beside the engine of a labelled pod.

It imports nothing of slotcar's other packages, nor torch or gRPC. The way of an admission: server → review →
annotations (what the pod asks for) → pod (may it have it, and which container) → sidecar (the pieces) → placing (into
the pod) → patch.
"""
