"""Where adapters come from: folders under allowed roots, and remote places that the operator allows by name."""
