"""How a Forward travels: one module per plane, all with the same meaning."""
