"""What the command line is made of beside cli.py."""
