"""The disk tier: verified adapters as files of one folder, which several sidecars may share and any may die in."""
