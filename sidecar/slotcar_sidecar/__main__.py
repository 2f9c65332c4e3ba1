"""`python -m slotcar_sidecar` is the `slotcar` command."""

from slotcar_sidecar.cli import main

if __name__ == "__main__":
    main()
