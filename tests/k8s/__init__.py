"""The injector as an API server meets it, in an environment of its own: make test-k8s."""
