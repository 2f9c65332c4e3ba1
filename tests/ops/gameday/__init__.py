"""The game day: trouble that is made for real, and what each of four places says of it while it lasts."""
