"""`python -m slotcar_injector` is the command `slotcar-injector`."""

from slotcar_injector.cli import main

main(prog_name="slotcar-injector")
